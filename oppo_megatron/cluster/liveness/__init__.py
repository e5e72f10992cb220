"""Liveness of a run: watchdogs, supervisor, failure records."""
