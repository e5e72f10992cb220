"""Rewards: rules, user functions, services and their weighted sum.  No torch here."""
