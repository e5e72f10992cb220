"""Prompts, completions, preference pairs and tokenizers: from a user's files to token ids.  No torch here."""
