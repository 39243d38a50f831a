"""What a run needs besides its algorithm: epochs, processes, checkpoints, records, interrupts."""
