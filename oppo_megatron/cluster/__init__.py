"""The ranks of a run: where they are, how they meet, and whether they live."""
