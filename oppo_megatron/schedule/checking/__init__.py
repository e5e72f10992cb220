"""Checks of a schedule."""
