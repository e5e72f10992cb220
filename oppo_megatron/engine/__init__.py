"""Models, caches, process groups and messages: everything that computes or communicates."""
