"""Judges policies on held-out prompts: scores, means with standard errors, paired differences."""
