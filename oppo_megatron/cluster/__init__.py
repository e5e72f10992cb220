"""The ranks of a run: hosts, rendezvous, liveness."""
