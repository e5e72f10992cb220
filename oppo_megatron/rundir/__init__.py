"""A run directory: paths, checkpoints, and reading and writing of its files.  No torch here."""
