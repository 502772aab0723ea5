"""Describe: the devices of a cluster, its links, and what was measured on them."""
