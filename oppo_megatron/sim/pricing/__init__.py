"""Seconds of each role and phase of a configuration on a cluster, by the laws."""
