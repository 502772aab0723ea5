"""Describe: a model as layers and edges, as frozen data."""
