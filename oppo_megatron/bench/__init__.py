"""Benchmarks of whole runs."""
