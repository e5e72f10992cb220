"""Training: PPO with overlap, supervised fine-tuning and reward modelling, and the files that a run writes."""
