"""KV caches of a pipeline stage, and attention over them."""
