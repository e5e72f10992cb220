"""Trained policies that answer prompts: finding one in a directory, and loading it on the ranks."""
