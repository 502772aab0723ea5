"""Use: what a user writes for a model, a plan or a cluster, and what it stands for."""
