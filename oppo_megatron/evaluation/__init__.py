"""Policies judged on held-out prompts: scores of responses, means with standard errors, differences between policies."""
