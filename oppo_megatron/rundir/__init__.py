"""The content of a run directory: its paths, its checkpoints, readers and writers of its files.  No torch here."""
