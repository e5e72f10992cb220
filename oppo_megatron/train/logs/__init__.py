"""Outputs of a running run: lines of metrics, console, trackers, traces of each rank, pictures."""
