"""Rewards: rules that verify a final answer, a user's Python function, and their weighted sum with a reward model.  No
torch here.
"""
