"""The experiments that lessons and pages show: digits in other colours, algorithms, baselines."""
