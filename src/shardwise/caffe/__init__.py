"""Caffe's files as models and training runs: nets, solvers, weights and the data they name."""
