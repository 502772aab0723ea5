"""Caffe's files as models: nets in prototxt files."""
