"""Benchmarks of whole runs: what the overlaps save, what settings cost, and how far a step is from its limits."""
