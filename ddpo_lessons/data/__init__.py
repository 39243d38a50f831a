"""What rollouts are asked for: prompts, images from folders, and checks of what users' functions return."""
