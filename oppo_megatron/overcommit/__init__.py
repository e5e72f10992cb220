"""Inter-step overlap: the buffer with a batch and delta more rollouts, and the scheduler that admits prompts."""
