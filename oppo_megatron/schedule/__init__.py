"""Schedules as data: what every rank does in a step, and how its work is packed.  Pure: no torch, no processes."""
