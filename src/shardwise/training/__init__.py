"""Use: training runs, from settings to trained weights, checkpoints, metrics and a report."""
