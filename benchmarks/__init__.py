"""Scripts that measure: recordings of the peers and long experiments. Not in the wheel."""
