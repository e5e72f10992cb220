"""Prompts, completions, preference pairs and tokenizers: everything between a user's files and token ids.  No torch
here.
"""
