"""The experiments that lessons and pages show: the demo, lesson 07's task, damage, algorithms, baselines."""
