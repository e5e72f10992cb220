"""Simulate the cost of a run on a described cluster: devices, links, laws of seconds, virtual time."""
