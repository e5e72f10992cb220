"""Liveness of a run: watchdogs of its ranks, the supervisor over them, and the failures that ended ranks leave."""
