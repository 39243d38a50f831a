"""The command line: what each command does, its flags, and the presets."""
