"""Role placements, layouts and memory of ranks, and whether they fit. No torch here."""
