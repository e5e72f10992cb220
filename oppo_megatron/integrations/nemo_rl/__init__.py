"""Pieces for NeMo-RL (docs/nemo_rl.md).  None of them imports NeMo-RL: it loads them by name from its own configuration."""
