"""Describe: boxes of tensors, who holds which, and what moves between two layouts; no torch."""
