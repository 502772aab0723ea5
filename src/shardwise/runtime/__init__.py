"""Execute: a model whose weights are blocks, and the passes through it."""
