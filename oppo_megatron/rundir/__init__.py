"""What a run directory holds: its paths, its checkpoints, readers and writers of its files.  No torch here."""
