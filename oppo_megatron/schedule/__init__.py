"""Schedules as data: every rank's actions, and the packing of its work. No torch, no processes."""
