"""Schedules as data, without torch or processes."""
