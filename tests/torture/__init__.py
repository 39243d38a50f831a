"""Attacks on training runs, which `make torture` runs: kills, full disks, damaged files, wrong inputs."""
