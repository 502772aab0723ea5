"""Measuring a machine: layers, links, sums, and the cluster file made of them."""
