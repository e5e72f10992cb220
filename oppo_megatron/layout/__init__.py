"""Role placements, layouts, holdings and memory of ranks, and whether they fit.  No torch here."""
