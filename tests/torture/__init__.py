"""Experiments that try to break a training run, and count what happens: `make torture`."""
