"""Simulate the cost of a run on a described cluster: devices and links, laws of seconds, events in virtual time."""
