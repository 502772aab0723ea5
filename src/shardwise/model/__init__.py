"""Describe: from an nn.Module to its layer graph, and what forward reads and leaves behind."""
