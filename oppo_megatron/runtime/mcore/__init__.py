"""The only room that imports megatron-core."""
