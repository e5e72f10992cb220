"""Benchmarks of whole runs: savings by overlap, cost of settings, a step's distance from its limits."""
