"""What rollouts are asked for: prompts, images from folders, and the checks of what users' functions return."""
