"""Text PPO, for lesson 05: beside TRL 1.12, over the KL coefficient, and carried over to DDPO."""
