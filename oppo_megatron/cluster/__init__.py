"""Hosts, rendezvous and liveness of ranks."""
