"""Inter-step overlap: the rollout buffer, and the scheduler that admits prompts."""
