"""Configurations of runs that are not started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oppo_megatron.config.run import TrainConfig


def least_config(run_dir: Path, **sections: Any) -> TrainConfig:
    """What a PPO run must have, of files that are not there, and `sections` beside it."""
    return TrainConfig.model_validate(
        {
            "run_dir": run_dir,
            "tokenizer": {"path": "t"},
            "data": {"path": "d"},
            "actor": {"checkpoint": "a"},
            "critic": {"checkpoint": "a"},
            "rewards": [{"kind": "verifier", "name": "gsm8k"}],
            "rollout": {"batch_size": 8, "max_response_tokens": 100},
            **sections,
        }
    )
