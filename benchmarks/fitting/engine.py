"""The engine's time beyond the laws, from steps of runs on one rank without overlaps.

With l the host's time for a layer that is launched, r for one of a decode step, and factors d, e, u on the kernels of decoding,
reading and training, a phase of such a step takes

    seconds = known + l x launches + r x layers of decode steps + (d or e or u) x kernels

which is linear in the five.  Steps with one core and with several separate the host's time, which further cores do not
shorten, from the kernels'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.fitting.nonnegative import Floats, relative_fit
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import DataError
from oppo_megatron.sim.clusters.cluster import Cluster, Engine, Source
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.pricing.prices import Prices, seen_by

PARAMETERS = ("launch_s", "replay_s", "decode", "read", "update")
PHASES = ("decode", "score", "update", "critic update")
"""Decoding with the prompts before it, scoring by all roles, and the updates."""


@dataclass(frozen=True)
class Observed:
    """A step of a run on one rank without overlaps: its responses, and the seconds of those `PHASES` that it has."""

    config: TrainConfig
    decoding: Decoding
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class EngineFit:
    """The engine, with its mean relative error over the phases of the steps, by phase."""

    engine: Engine
    errors: Mapping[str, float]


def fit_engine(cluster: Cluster, steps: Sequence[Observed], source: Source) -> EngineFit:
    """The five constants by least squares of relative errors, none below 0.  Raises DataError without steps."""
    if not steps:
        raise DataError("no step was measured; let the runs make two or more, as the first of a run warms up")
    names = [(step, phase) for step, each in enumerate(steps) for phase in each.seconds]
    known = _stacked(cluster, steps, dict.fromkeys(PARAMETERS, 0.0))
    features = np.stack(
        [_stacked(cluster, steps, {name: float(name == own) for name in PARAMETERS}) - known for own in PARAMETERS], axis=1
    )
    measured = np.array([steps[step].seconds[phase] for step, phase in names])
    found = relative_fit(features, measured, known)
    engine = Engine(source=source, **dict(zip(PARAMETERS, found.tolist(), strict=True)))
    relative = np.abs((known + features @ found) / measured - 1)
    errors = {
        phase: float(np.mean([relative[row] for row, (_, own) in enumerate(names) if own == phase])) for phase in PHASES
        if any(own == phase for _, own in names)
    }  # fmt: skip
    return EngineFit(engine, errors)


def _stacked(cluster: Cluster, steps: Sequence[Observed], values: Mapping[str, float]) -> Floats:
    """Seconds of every observed phase by an engine of these values."""
    adapted = replace(cluster, adapted=Engine(source=Source("assumed", "one of the five constants"), **values))
    predicted = [phase_seconds(adapted, step.config, step.decoding) for step in steps]
    return np.array([seconds[phase] for seconds, step in zip(predicted, steps, strict=True) for phase in step.seconds])


def phase_seconds(cluster: Cluster, config: TrainConfig, decoding: Decoding) -> dict[str, float]:
    """Seconds of a step by `PHASES`."""
    found = dict.fromkeys(PHASES, 0.0)
    for (role, phase), seconds in Prices(config, seen_by(config, cluster), decoding).rows().items():
        if phase in ("prompts", "decode"):
            found["decode"] += seconds
        elif phase == "score":
            found["score"] += seconds
        elif phase == "update":
            found["update" if role == "actor" else "critic update"] += seconds
    return found
