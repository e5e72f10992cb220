"""A measuring run: its configuration, and its figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from oppo_megatron import __version__
from oppo_megatron.config.model import PlacementConfig
from oppo_megatron.config.run import LoggingConfig, TrainConfig, TrainSettings
from oppo_megatron.errors import PlacementError
from oppo_megatron.layout.placing.candidates import Machine

MEASURED_STEPS = 3
"""PPO steps of a measuring run; the first is a warm-up and does not count."""


class Run(NamedTuple):
    """What the steps after the first took, on the actor's output rank: sums over them."""

    steps: int
    tokens: int  # of trained responses
    seconds: float
    decode_s: float  # rounds that decoded
    train_s: float  # updates of the actor

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def other_s(self) -> float:
        """Scoring after the last decoded chunk, waiting for scores, and for the critic's update where it is not hidden."""
        return self.seconds - self.decode_s - self.train_s


def probe_config(settings: TrainSettings, placement: PlacementConfig, run_dir: Path) -> TrainConfig:
    """The configuration of a measuring run.

    It has the models, prompts, seed and overlaps of `settings`.  It is short and quiet and keeps no weights; the chunk size
    stays as it is at the start, since a search would give every step another one.
    """
    config = settings.with_placement(placement)
    chunk = config.overlap.chunk.model_copy(update={"adaptive": False})
    changes = {
        "run_dir": run_dir,
        "steps": MEASURED_STEPS,
        "epochs": None,
        "overlap": config.overlap.model_copy(update={"chunk": chunk}),
        "logging": LoggingConfig(console="off", trace=False),
        "evaluation": None,
        "early_stop": None,
        "checkpoint": config.checkpoint.model_copy(update={"every_minutes": 0.0, "final": "nothing"}),
    }
    return config.model_copy(update=changes)


def fingerprint(settings: TrainSettings, machine: Machine) -> str:
    """Equal where the same would be measured: of what the measuring runs replace, nothing counts."""
    probe = probe_config(settings, PlacementConfig(mode="single"), Path())
    measured = [__version__, asdict(machine), MEASURED_STEPS, probe.model_dump(mode="json")]
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:16]


def read_run(lines: Sequence[Mapping[str, Any]]) -> Run:
    """The figures of the lines of a `metrics.jsonl`.  Raises PlacementError where none is left after the first."""
    steady = lines[1:]
    if not steady:
        raise PlacementError(
            f"the measuring run has {len(lines)} step{'s' * (len(lines) != 1)}, but the first one only warms up and another "
            "must follow; give more prompts"
        )
    tokens = sum(line["trained_len_mean"] * sum(line["deferred"].values()) for line in steady)
    seconds, decode_s, train_s = (sum(line[name] for line in steady) for name in ("step_s", "decode_s", "train_s"))
    return Run(len(steady), round(tokens), seconds, decode_s, train_s)
