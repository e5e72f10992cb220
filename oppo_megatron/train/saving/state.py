"""The state of a run in a checkpoint apart from weights, and the comparison with the run that continues from it.

`state.json` has counters, controllers and books, `rollouts.jsonl` a line per rollout in the buffer.  A line names its prompt by
the position in the stream, which seed and data fix; the fingerprint of the data is checked first.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oppo_megatron.config.changes import changed_settings
from oppo_megatron.config.derived import adapters
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.data.prompts import PromptStream
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.placements import MODEL_FIELDS
from oppo_megatron.records import Rollout

ROLLOUT_FIELDS = (
    "admission", "tokens", "logprobs", "sampling_logprobs", "versions", "deferrals", "finish_clock", "finish_reason",
)  # fmt: skip
"""Fields of a rollout in its line, in addition to the position of its prompt."""

FIXED = {
    "seed": "seed",
    "shuffle": "data.shuffle",
    "rows": "the number of usable {noun}",
    "group_size": "rollout.group_size",
    "greedy": "whether a prompt has a greedy response (algorithm.baseline)",
}
"""Entries of a checkpoint's `data` that a continued run must share, in words."""


def books_state(rounds: RoundRunner) -> dict[str, Any]:
    """Return the planner's books, and the layout that they and the caches belong to: ranks and slots of every role."""
    planner = rounds.planner
    books = {"actor": planner.actor, **planner.scorers}
    layout = {
        name: {"ranks": list(p.ranks), "tp": p.tp, "pp": p.pp, "dp": p.dp, "slots": books[name].slots}
        for name, p in planner.site.placements.items()
    }
    return {"layout": layout, "books": {name: book.state_dict() for name, book in books.items()}}


def frozen_models(settings: Mapping[str, Any]) -> list[list[Any]]:
    """Return the settings that define reference and reward model; caches of other models do not fit them.

    A null reference has the adapters that the actor starts with.
    """
    roles = settings.get("reference") or settings.get("actor"), settings.get("reward")
    return [
        [*(role.get(name) for name in MODEL_FIELDS), (role.get("lora") or {}).get("adapter")]
        if isinstance(role, Mapping)
        else []
        for role in roles
    ]


def require_same_data(saved: Mapping[str, Any], now: Mapping[str, Any], noun: str = "prompts") -> None:
    """Raises CheckpointError that names the change; `noun` is the word for the data."""
    for name in (name for name in FIXED if name in now):
        if saved[name] != now[name]:
            raise CheckpointError(
                f"{FIXED[name].format(noun=noun)} is {now[name]}, but the checkpoint's run has {saved[name]}: the {noun} would "
                "come in another order; resume with what the run began with, or start a new run in another run_dir"
            )
    if saved["fingerprint"] != now["fingerprint"]:
        raise CheckpointError(
            f"the {noun} (their tokens, texts or other columns) are not those that the checkpoint's run began with: "
            f"fingerprint {now['fingerprint'][:12]}, not {saved['fingerprint'][:12]}; resume with the same data, tokenizer "
            "and template, or start a new run in another run_dir"
        )


def adapter_state(config: TrainConfig | SupervisedConfig) -> dict[str, Any]:
    """Return the settings of adapters that their tensors do not contain, by role."""
    return {
        name: {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.projections)}
        for name, lora in adapters(config).items()
    }


def require_same_adapters(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises CheckpointError that names the change: another scale or rank would be another policy."""

    def described(lora: Mapping[str, Any] | None, missing: str) -> str:
        return missing if lora is None else ", ".join(f"{key} {value}" for key, value in lora.items())

    for name in sorted(saved.keys() | now.keys()):
        if saved.get(name) != now.get(name):
            raise CheckpointError(
                f"{name}.lora is {described(now.get(name), 'null')}, but the checkpoint's run has "
                f"{described(saved.get(name), 'none')}; resume with what the run began with, or start a new run in another "
                "run_dir"
            )


def rollout_lines(rollouts: Iterable[Rollout]) -> Iterator[str]:
    """Yield a line of JSON per rollout; numbers keep every bit."""
    for rollout in rollouts:
        line = {"seq_id": rollout.seq_id} | {name: getattr(rollout, name) for name in ROLLOUT_FIELDS}
        yield json.dumps(line) + "\n"


def make_rollouts(lines: Iterable[Mapping[str, Any]], prompts: PromptStream) -> list[Rollout]:
    """Build the rollouts that `rollout_lines` wrote; `prompts` is the run's stream."""
    return [Rollout(prompts.at(line["seq_id"]), **{name: line[name] for name in ROLLOUT_FIELDS}) for line in lines]


def source_state(config: TrainConfig) -> dict[str, str]:
    """Return the SHA-256 of each reward function's file, by entry point; modules without a file are left out."""
    paths = {part.entry_point: _source(part.entry_point) for part in config.rewards if part.entry_point}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if path is not None}


def _source(entry_point: str) -> Path | None:
    name = entry_point.rpartition(":")[0]
    if name.endswith(".py"):
        return Path(name) if Path(name).is_file() else None
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None  # loading the function reports the error
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return path if path is not None and path.is_file() else None


def describe_start(run_dir: Path, name: str, done: int, saved_at: float) -> str:
    """Return the line of a run that continues from the checkpoint `name`, saved at `saved_at` (epoch seconds)."""
    seconds = max(time.time() - saved_at, 0.0)
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    unit, size = next(((unit, size) for unit, size in units if seconds >= 2 * size), ("s", 1.0))
    return f"{run_dir}: continued from checkpoint {name}, saved {seconds / size:.0f} {unit} ago, after {done} steps"


def changes(
    then: Mapping[str, Any], now: Mapping[str, Any], sources: Mapping[str, str], sources_now: Mapping[str, str]
) -> list[str]:
    """Return a line per setting, and per file of a reward function, that differs from the checkpoint's run."""
    lines = [f"changed: {change}" for change in changed_settings(then, now)]
    return lines + [
        f"changed: the file of {name}" for name, digest in sources_now.items() if sources.get(name, digest) != digest
    ]


def describe_missing(run_dir: Path) -> str:
    return f"{run_dir} has no checkpoint to continue from: a new run begins"
