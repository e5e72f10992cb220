"""Clusters of `cluster.yaml`, with the source of each constant."""
