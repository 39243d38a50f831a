"""Seconds, memory and gradients: beside other trainers, change by change, on a GPU, until a result."""
