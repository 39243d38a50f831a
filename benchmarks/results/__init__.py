"""The experiments that lessons and pages show: the demo, its ablations, damage, algorithms, and baselines."""
