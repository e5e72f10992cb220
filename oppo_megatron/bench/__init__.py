"""Benchmarks of whole runs: savings by the overlaps, the cost of settings, and a step's distance from its limits."""
