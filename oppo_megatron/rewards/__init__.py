"""Rewards: rules, user functions, services, and their weighted sum with a reward model.  No torch here."""
