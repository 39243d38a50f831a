"""Reinforcement learning of diffusion models."""
