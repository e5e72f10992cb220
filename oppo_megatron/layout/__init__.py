"""What lives on which rank, and whether it fits: role placements, layouts, holdings, memory.  No torch here."""
