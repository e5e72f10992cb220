"""A run directory: its paths, checkpoints, and readers and writers of its files.  No torch here."""
