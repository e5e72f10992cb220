"""The choice of a placement, its reason, and its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from oppo_megatron.errors import PlacementError
from oppo_megatron.layout.placing.candidates import Candidate, Options
from oppo_megatron.layout.placing.trials import Trial, close_ones, ranked

PARTS = {
    "decode_s": "rounds that decode",
    "train_s": "update of the actor",
    "other_s": "scoring and waiting that nothing hides",
}
"""The parts of a step on the actor's output rank: attributes of `Run`, in words."""


@dataclass(frozen=True)
class Choice:
    """The placement taken.  `margin`: how much more time the next one needs, as a share; None where there is none."""

    candidate: Candidate
    margin: float | None
    reason: str


def choose(options: Options, trials: Sequence[Trial]) -> Choice:
    """The placement of least time, or the only one.  Raises PlacementError, with the first one's error, if all failed."""
    if len(options.candidates) == 1 and not trials:
        only = options.candidates[0]
        return Choice(
            only, None, f"{only.name} is the only placement to choose from on {options.machine}; nothing measured"
        )
    order = ranked(trials)
    if not order:
        first = trials[0]
        raise PlacementError(
            f"none of {len(trials)} placements could be measured; the first, {first.candidate.name}, ended with: "
            f"{first.failure}"
        )
    best = order[0]
    if len(order) == 1:
        return Choice(best.candidate, None, f"{_speed(best)}; of {len(trials)} placements it is the only one that ran")
    following = order[1]
    margin = following.seconds_per_token / best.seconds_per_token - 1
    return Choice(best.candidate, margin, "; ".join(_reasons(trials, best, following, margin)))


def _reasons(trials: Sequence[Trial], best: Trial, following: Trial, margin: float) -> list[str]:
    reasons = [
        f"{_speed(best)}; the next, {following.candidate.name}, needs {margin:.1%} more time",
        _where(best, following),
    ]
    if close := close_ones(trials):
        spread = max(trial.spread for trial in close)
        runs = f"{len(close)} are this close and were run {min(len(trial.runs) for trial in close)} times or more"
        either = ", more than what parts them: take it as a draw" if spread > margin else ""
        reasons.append(f"{runs}; runs of one placement differ by up to {spread:.1%}{either}")
    return reasons


def _speed(trial: Trial) -> str:
    return f"{trial.candidate.name} trains {1 / trial.seconds_per_token:.4g} tokens/s ({_a_step(trial, 'seconds'):.3g} s a step)"


def _where(best: Trial, following: Trial) -> str:
    """The part of a step in which the fastest gains most."""
    gains = {part: _a_step(following, part) - _a_step(best, part) for part in PARTS}
    part = max(gains, key=lambda name: gains[name])
    return f"most of it in {PARTS[part]}: {_a_step(best, part):.3g} s a step against {_a_step(following, part):.3g}"


def _a_step(trial: Trial, part: str) -> float:
    """Median over the runs of a part's seconds a step."""
    return median(float(getattr(run, part)) / run.steps for run in trial.runs)


def to_record(key: str, options: Options, trials: Sequence[Trial], choice: Choice) -> dict[str, Any]:
    """The content of `placement.json`.  `key` is the `fingerprint` of what was measured."""
    tried = {trial.candidate.name: trial for trial in trials}
    return {
        "chosen": {"name": choice.candidate.name, "placement": choice.candidate.yaml_tree()},
        "reason": choice.reason,
        "margin": choice.margin,
        "machine": asdict(options.machine),
        "candidates": [_row(candidate, tried.get(candidate.name)) for candidate in options.candidates],
        "left_out": [asdict(option) for option in options.left_out],
        "key": key,
    }


def _row(candidate: Candidate, trial: Trial | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": candidate.name, "placement": candidate.yaml_tree(), "ranks": candidate.num_ranks}
    if trial is None:
        return row
    row |= {"failure": trial.failure, "runs": [run._asdict() for run in trial.runs]}
    if trial.failure is None:
        row |= {"seconds_per_token": trial.seconds_per_token, "spread": trial.spread}
        row |= {f"step_{part}": _a_step(trial, part) for part in ("seconds", *PARTS)}
    return row
