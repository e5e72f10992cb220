"""Training: PPO with overlap, supervised fine-tuning and reward modelling, and what a run writes."""
