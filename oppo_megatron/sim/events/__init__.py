"""Calls on devices in virtual time."""
