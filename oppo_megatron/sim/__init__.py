"""Simulate the cost of a run on a described cluster."""
