"""The inputs of rollouts: prompts, images from folders, and checks of what users' functions return."""
