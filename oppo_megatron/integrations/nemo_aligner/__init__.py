"""NeMo-Aligner's PPO trainer with overcommit, deferral and streamed scoring (docs/nemo_aligner.md)."""

from __future__ import annotations

from typing import Any

from oppo_megatron.errors import ConfigError

__all__ = ["PPOTrainer"]


def __getattr__(name: str) -> Any:
    """Import `PPOTrainer` on first use, because nemo is slow to import."""
    if name != "PPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from oppo_megatron.integrations.nemo_aligner.trainer import PPOTrainer
    except ImportError as error:
        raise ConfigError(
            f"PPOTrainer is a subclass of NeMo-Aligner's, which cannot be imported ({error}); install nemo-aligner 0.7 and "
            "nemo-toolkit 2.1 to 2.4, or start the script in a NeMo container that has them"
        ) from error
    return PPOTrainer
