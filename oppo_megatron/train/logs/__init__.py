"""Measures steps (seconds by part, cause of each wait) and writes metrics, console lines, trackers and traces."""
