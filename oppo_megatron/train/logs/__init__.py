"""Measures a step (seconds by part, the cause of each wait), and writes lines of metrics, console, trackers and traces."""
