"""Schedules as data: every rank's actions in a step, and the packing of its work.  Pure: no torch, no processes."""
