"""Scripts that measure: speed beside other trainers, and long experiments. Not in the wheel."""
