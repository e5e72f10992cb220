"""Trained policies that answer prompts: finding one in a directory, and its model on the ranks."""
