"""Seconds, memory and gradients: beside the peers, change by change, on a GPU, until a result."""
