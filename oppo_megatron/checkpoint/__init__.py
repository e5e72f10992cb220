"""Checkpoints as files: whole or absent, checked before they are read, the oldest removed.  Knows nothing of models."""
