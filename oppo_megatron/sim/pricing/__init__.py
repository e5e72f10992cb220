"""Seconds of each role and phase on a cluster."""
