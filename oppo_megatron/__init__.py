"""Overlapped PPO (OPPO) for language models on Megatron-core.  Importing this package loads no heavy library."""

__version__ = "0.1.0"
