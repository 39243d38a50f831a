"""The command line and what it offers: demo, train, sample, doctor; presets, figures."""
