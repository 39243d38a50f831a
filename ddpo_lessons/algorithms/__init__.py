"""Algorithms: how rewards weigh samples, and the loss; one file each, to be read from top to bottom."""
