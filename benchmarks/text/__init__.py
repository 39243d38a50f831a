"""Text PPO, for lesson 05: beside TRL 1.12, over the price of a nat, and carried over to DDPO."""
