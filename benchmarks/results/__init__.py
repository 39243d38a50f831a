"""The experiments that lessons and pages show: digits in other colors, algorithms, baselines."""
