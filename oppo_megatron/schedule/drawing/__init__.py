"""Schedules to look at: text grids and pictures."""
