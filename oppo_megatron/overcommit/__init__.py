"""Inter-step overlap: the buffer that holds a batch and delta rollouts more, and the scheduler above the prompts."""
