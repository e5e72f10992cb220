"""The state of a run apart from weights, as JSON and JSON lines, and back.

`state.json` has the counters, controllers and books, `rollouts.jsonl` a line for each rollout in the buffer.  Prompts are named
by their positions in the stream, which (seed, data) fix; the data's fingerprint is checked before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from oppo_megatron.config.derived import adapters
from oppo_megatron.config.run import SupervisedConfig, TrainConfig
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.placements import MODEL_FIELDS
from oppo_megatron.records import Rollout
from oppo_megatron.train.saving.saveable import Saveable

ROLLOUT_FIELDS = (
    "admission", "tokens", "logprobs", "sampling_logprobs", "versions", "deferrals", "finish_clock", "finish_reason",
)  # fmt: skip
"""What a line has of a rollout, beside the position of its prompt."""


def run_state(run: Saveable, config: TrainConfig) -> dict[str, Any]:
    """The run's state between two rounds, on the rank that keeps the journal, in plain JSON types."""
    planner = run.rounds.planner
    return {
        **run.state_dict(),
        "layout": layout_of(run.rounds),
        "adapters": adapter_state(config),
        "books": {
            "actor": planner.actor.state_dict(),
            **{name: book.state_dict() for name, book in planner.scorers.items()},
        },
    }


def layout_of(rounds: RoundRunner) -> dict[str, Any]:
    """Which rank holds what of every role; caches fit where it is the same."""
    planner = rounds.planner
    books = {"actor": planner.actor, **planner.scorers}
    return {
        name: {
            "ranks": list(placement.ranks),
            "tp": placement.tp,
            "pp": placement.pp,
            "dp": placement.dp,
            "slots": books[name].slots,
        }
        for name, placement in planner.site.placements.items()
    }


def frozen_models(settings: Mapping[str, Any]) -> list[list[Any]]:
    """What reference and reward model are made from, by a configuration in plain JSON types; caches of others do not fit them.

    A null reference has the adapters that the actor is given.
    """
    roles = settings.get("reference") or settings.get("actor"), settings.get("reward")
    return [
        [*(role.get(name) for name in MODEL_FIELDS), (role.get("lora") or {}).get("adapter")]
        if isinstance(role, Mapping)
        else []
        for role in roles
    ]


def data_state(config: TrainConfig, prompts: PromptSet) -> dict[str, Any]:
    """What fixes the order of the prompts."""
    fingerprint = prompts.fingerprint()
    return {
        "seed": config.seed,
        "shuffle": config.data.shuffle,
        "rows": len(prompts),
        "fingerprint": fingerprint,
        "group_size": config.rollout.group_size,
        "greedy": config.algorithm.greedy,
    }


def require_same_data(saved: dict[str, Any], now: dict[str, Any], noun: str = "prompts") -> None:
    """Raises CheckpointError that names the change; `noun`: the word for the data."""
    known = {
        "seed": "seed",
        "shuffle": "data.shuffle",
        "rows": f"the number of usable {noun}",
        "group_size": "rollout.group_size",
        "greedy": "whether a prompt has a greedy response (algorithm.baseline)",
    }
    usual = {"group_size": 1, "greedy": False}  # of an older run, and of sft and rm, which have no groups
    for name, words in known.items():
        before, here = saved.get(name, usual.get(name)), now.get(name, usual.get(name))
        if before != here:
            raise CheckpointError(
                f"{words} is {here}, but the checkpoint's run has {before}: the {noun} would come in another "
                "order; resume with what the run began with, or start a new run in another run_dir"
            )
    if saved["fingerprint"] != now["fingerprint"]:
        raise CheckpointError(
            f"the {noun} (their tokens, texts or other columns) are not those that the checkpoint's run began with: "
            f"fingerprint {now['fingerprint'][:12]}, not {saved['fingerprint'][:12]}; resume with the same data, tokenizer "
            "and template, or start a new run in another run_dir"
        )


def adapter_state(config: TrainConfig | SupervisedConfig) -> dict[str, Any]:
    """What the tensors of adapters do not say of them, by role."""
    return {
        name: {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.projections)}
        for name, lora in adapters(config).items()
    }


def require_same_adapters(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises CheckpointError, naming what has changed: with another scale, or fewer pairs, it would be another policy."""
    for name in sorted(saved.keys() | now.keys()):
        if saved.get(name) != now.get(name):
            ours, theirs = _described(now.get(name), "null"), _described(saved.get(name), "none")
            raise CheckpointError(
                f"{name}.lora is {ours}, but the checkpoint's run has {theirs}; resume with what the run began with, or start a "
                "new run in another run_dir"
            )


def _described(lora: dict[str, Any] | None, lacking: str) -> str:
    return lacking if lora is None else ", ".join(f"{key} {value}" for key, value in lora.items())


def rollout_lines(rollouts: Iterable[Rollout]) -> Iterator[str]:
    """A line of JSON for each; numbers keep every bit."""
    for rollout in rollouts:
        line = {"seq_id": rollout.seq_id} | {name: getattr(rollout, name) for name in ROLLOUT_FIELDS}
        yield json.dumps(line) + "\n"


def make_rollouts(lines: Iterable[Mapping[str, Any]], prompts: PromptStream) -> list[Rollout]:
    """The rollouts that `rollout_lines` wrote; `prompts` are the run's."""
    return [Rollout(prompts.at(line["seq_id"]), **{name: line[name] for name in ROLLOUT_FIELDS}) for line in lines]
