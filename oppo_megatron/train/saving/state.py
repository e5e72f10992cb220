"""The state of a run apart from weights: its entries, the last complete checkpoint, and its comparison with the resumed run.

`state.json` has counters, controllers and books, `rollouts.jsonl` a line per buffered rollout.  A line names its prompt by stream
position, which seed and data fix, so the data's fingerprint is checked first.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oppo_megatron.clock import format_duration, to_stderr, while_silent
from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import adapters, batch_rows, members
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.data.prompts import PromptSet, PromptStream, RowOrder
from oppo_megatron.data.supervised_rows import Rows
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.placements import MODEL_FIELDS
from oppo_megatron.mcore.weights.dist_source import INDEX
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.overcommit.ahead import Ahead, require_bounded_deferrals, require_prompts, require_resumable, require_work
from oppo_megatron.records import Rollout, Source
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.manifest import OtherFormatError, find_damage, find_misfits, read_manifest
from oppo_megatron.train.saving.schema import PPO_STATE, ROLLOUT, SUPERVISED_STATE, read_lines, read_state
from oppo_megatron.train.saving.writing import CACHES, MODELS, ROLLOUTS, STATE


@dataclass(frozen=True)
class Found:
    folder: Path
    state: dict[str, Any]
    rollouts: list[dict[str, Any]]

    @property
    def position(self) -> int:
        return int(self.state["scheduler"]["position"])

    def held(self, left_out: Set[int]) -> list[dict[str, Any]]:
        return [line for line in self.rollouts if line["seq_id"] not in left_out]

    def ahead(self, left_out: Set[int]) -> Ahead:
        return Ahead(int(self.state["done"]), self.position, len(self.held(left_out)), left_out)


def find_checkpoint(config: TrainConfig | SupervisedConfig, world: World) -> Found | None:
    """Return the last complete checkpoint, the same on every rank; None unless the run is to resume.

    Collective.  Damaged checkpoints are reported and renamed.  Raises CheckpointError if none is complete, OtherFormatError
    (nothing renamed) for another version's.
    """
    if not config.resume:
        return None
    store = CheckpointStore(RunDirectory(config.run_dir).checkpoints)
    vocab_size = read_hf_config(config.actor)["vocab_size"] if isinstance(config, TrainConfig) else None
    if world.rank == 0:
        store.recover()
    found: list[Any] = [store.positions()]
    dist.broadcast_object_list(found, src=0)
    damages: dict[Position, str] = {}
    for position in reversed(found[0]):
        checking = partial(str, f"checking the files of checkpoint {position.name}")
        with while_silent(checking, to_stderr) if world.rank == 0 else nullcontext():
            damage = _damage(store.folder(position), world, vocab_size)
        if damage:
            damages[position] = damage
            continue
        for each, reason in damages.items() if world.rank == 0 else ():
            text = f"checkpoint {each.name} is damaged ({reason}): continuing from {position.name}"
            print(text, file=sys.stderr, flush=True)
            store.set_aside(each)
        return _read(store.folder(position), vocab_size)
    if damages:
        reasons = "; ".join(f"{position.name}: {damage}" for position, damage in damages.items())
        raise CheckpointError(
            f"{store.root}: none of its checkpoints is whole ({reasons}); restore one from a copy, or choose another run_dir"
        )
    return None


def _read(folder: Path, vocab_size: int | None) -> Found:
    if vocab_size is None:
        return Found(folder, read_state(folder / STATE, SUPERVISED_STATE), [])
    state = read_state(folder / STATE, PPO_STATE)
    return Found(folder, state, read_lines(folder / ROLLOUTS, state, vocab_size))


def _damage(folder: Path, world: World, vocab_size: int | None) -> str | None:
    mine: str | CheckpointError | None
    files = (STATE, f"{MODELS}/{INDEX}", *(() if vocab_size is None else (ROLLOUTS,)))
    try:
        entries = read_manifest(folder)
        mine = find_misfits(folder, entries, files, (MODELS, CACHES))
        mine = mine or find_damage(folder, entries, world.rank, world.size)
        if mine is None and world.rank == 0:  # an intact file may still not be the state of a run
            _read(folder, vocab_size)
    except CheckpointError as error:
        mine = error
    found: list[str | CheckpointError | None] = [None] * world.size
    dist.all_gather_object(found, mine)
    if other := next((damage for damage in found if isinstance(damage, OtherFormatError)), None):
        raise other
    return next((str(damage) for damage in found if damage is not None), None)


ROLLOUT_FIELDS = tuple(name for name in ROLLOUT.model_fields if name != "seq_id")
"""Fields of a rollout's line, in addition to its prompt's position."""

FIXED = {
    "seed": "seed",
    "shuffle": "data.shuffle",
    "rows": "the number of usable {noun}",
    "weights": "data.path, as a list of usable {noun} and their weight,",
    "group_size": "rollout.group_size",
    "greedy": "whether a prompt has a greedy response (algorithm.baseline)",
}
"""Entries of a checkpoint's `data` that a resumed run must share, in words."""


def books_state(rounds: RoundRunner) -> dict[str, Any]:
    planner = rounds.planner
    books = {"actor": planner.actor, **planner.scorers}
    layout = {
        name: {"ranks": list(p.ranks), "tp": p.tp, "pp": p.pp, "dp": p.dp, "slots": books[name].slots}
        for name, p in planner.site.placements.items()
    }
    return {"layout": layout, "books": {name: book.state_dict() for name, book in books.items()}}


def frozen_models(settings: Mapping[str, Any]) -> list[list[Any]]:
    """Settings that define reference and reward model: caches of other models do not fit.

    A null reference has the actor's initial adapters.
    """
    found = []
    for role in (settings.get("reference") or settings.get("actor"), settings.get("reward")):
        values = role if isinstance(role, Mapping) else {}
        lora = values.get("lora")
        found.append(
            [*map(values.get, MODEL_FIELDS), lora.get("adapter") if isinstance(lora, Mapping) else lora] if values else []
        )
    return found


def prompt_data(config: TrainConfig, prompts: PromptSet) -> dict[str, Any]:
    data = _data(config, prompts.sources, prompts.fingerprint())
    return data | {"group_size": config.rollout.group_size, "greedy": config.algorithm.greedy}


def row_data(config: SupervisedConfig, rows: Rows[Any]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for part in (part for row in rows for part in row):
        code = "d" if any(isinstance(value, float) for value in part) else "q"
        digest.update(len(part).to_bytes(8, "little") + array(code, part).tobytes())
    return _data(config, rows.sources, digest.hexdigest())


def _data(config: TrainConfig | SupervisedConfig, sources: Sequence[Source], fingerprint: str) -> dict[str, Any]:
    data = {"seed": config.seed, "shuffle": config.data.shuffle, "rows": len(sources), "fingerprint": fingerprint}
    weights = [[num_rows, source.weight] for num_rows, source in RowOrder(sources).parts]
    return data | {"weights": weights if any(weight != 1 for _, weight in weights) else []}


def adapter_state(config: TrainConfig | SupervisedConfig) -> dict[str, Any]:
    return {
        name: {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.projections)}
        for name, lora in adapters(config).items()
    }


def source_state(config: TrainConfig) -> dict[str, str]:
    """SHA-256 of each reward function's file, by entry point; modules without a file are left out."""
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


def rollout_lines(rollouts: Iterable[Rollout]) -> Iterator[str]:
    for rollout in rollouts:
        line = {"seq_id": rollout.seq_id} | {name: getattr(rollout, name) for name in ROLLOUT_FIELDS}
        yield json.dumps(line) + "\n"


def make_rollouts(lines: Iterable[Mapping[str, Any]], prompts: PromptStream) -> list[Rollout]:
    return [Rollout(prompts.at(line["seq_id"]), **{name: line[name] for name in ROLLOUT_FIELDS}) for line in lines]


def require_same_run(
    found: Found, data: Mapping[str, Any], config: TrainConfig | SupervisedConfig, noun: str = "prompts"
) -> None:
    """Raise CheckpointError naming the change if data or adapters differ; `noun`: word for the data."""
    saved = {"weights": []} | found.state["data"]
    for name in (name for name in FIXED if name in data):
        if saved[name] != data[name]:
            raise CheckpointError(
                f"{FIXED[name].format(noun=noun)} is {data[name]}, but the checkpoint's run has {saved[name]}: the {noun} would "
                "come in another order; resume with what the run began with, or start a new run in another run_dir"
            )
    if saved["fingerprint"] != data["fingerprint"]:
        raise CheckpointError(
            f"the {noun} (their tokens, texts or other columns) are not those that the checkpoint's run began with: "
            f"fingerprint {data['fingerprint'][:12]}, not {saved['fingerprint'][:12]}; resume with the same data, tokenizer "
            "and template, or start a new run in another run_dir"
        )

    then, now = found.state["adapters"], adapter_state(config)
    for name in sorted(then.keys() | now.keys()):  # another scale or rank would be another policy
        if then.get(name) != now.get(name):
            is_now, was = (", ".join(f"{key} {value}" for key, value in (x.get(name) or {}).items()) for x in (now, then))
            raise CheckpointError(
                f"{name}.lora is {is_now or 'null'}, but the checkpoint's run has {was or 'none'}; resume with what the run "
                "began with, or start a new run in another run_dir"
            )


def rest_of_run(found: Found, data: Mapping[str, Any], config: TrainConfig, prompts: PromptSet, left_out: Set[int]) -> Ahead:
    """Return what is left of a checkpoint's PPO run, without the stream positions `left_out`.

    Raises CheckpointError if prompts, order or adapters differ, nothing is left, or rollouts in flight would exceed
    `overlap.max_staleness`.
    """
    require_same_run(found, data, config)
    ahead = found.ahead(left_out)
    require_resumable(ahead.done, config.steps)
    a_pass, passes = prompts.rollouts_per_pass, config.passes
    most = None if passes is None else prompts.rollouts(passes)
    require_prompts(ahead, most, a_pass)
    if RunDirectory(config.run_dir).finished:
        require_work(ahead, config.steps, most, batch_rows(config))
    if ahead.done != config.steps:
        taken = {seq_id for entry in found.state.get("queue", ()) for seq_id in entry["seq_ids"]}
        rollout, held = config.rollout, [line for line in found.held(left_out) if line["seq_id"] not in taken]
        deferrals = [line["deferrals"] for line in held[:: members(config).size]]
        groups = rollout.batch_size // rollout.group_size
        require_bounded_deferrals(deferrals, groups, rollout.group_size, config.overlap.max_staleness)
    return ahead


def describe_changes(run_dir: Path, found: Found, settings: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    state, then = found.state, found.state.get("sources", {})
    ago = f"saved {format_duration(max(time.time() - state['saved_at'], 0.0))} ago, after {state['done']} steps"
    changed = changed_settings(state["config"], settings)
    changed += [f"the file of {name}" for name, digest in sources.items() if then.get(name, digest) != digest]
    return [f"{run_dir}: continued from checkpoint {found.folder.name}, {ago}", *(f"changed: {each}" for each in changed)]


def describe_missing(run_dir: Path) -> str:
    return f"{run_dir} has no checkpoint to continue from: a new run begins"


STARTING = ("checkpoint", "init", "lora.adapter")
"""Settings that named the source of a trained role's weights when the run began."""

SHOWN = 60


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return `key: old -> new` per difference, and if the checkpoint's value is kept."""
    return [
        f"{key}: {_shown(old)} -> {_shown(new)}{_kept(key, now)}" for key, old, new in _differences(then, now) if key != "run_dir"
    ]


def _kept(key: str, now: Mapping[str, Any]) -> str:
    role, _, name = key.partition(".")
    if role in ("actor", "critic", "model") and name.startswith(STARTING):
        return f" (the {role}'s weights come from the checkpoint)"
    if key == "ppo.kl.coefficient" and _at(now, "ppo.kl.target") is not None:
        return " (the adaptive coefficient continues from the checkpoint)"
    if key == "overlap.delta.initial" and _at(now, "overlap.delta.rule") != "fixed":
        return " (delta continues from the checkpoint)"
    if key == "overlap.chunk" and isinstance(_at(now, "overlap.chunk"), list):
        return " (the chunk size continues from the checkpoint)"
    return ""


_ABSENT = object()


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys with both values; sections or lists on one side only are one value."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**new, **old}:
            below = f"{key}.{name}" if key else str(name)
            yield from _differences(old.get(name, _ABSENT), new.get(name, _ABSENT), below)
    elif _are_sections(old) and _are_sections(new):
        for index, (one, other) in enumerate(zip_longest(old, new, fillvalue=_ABSENT)):
            yield from _differences(one, other, f"{key}.{index}")
    elif (None if old is _ABSENT else old) != (None if new is _ABSENT else new):  # null says no more than nothing does
        yield key, old, new


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = _plain(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _plain(value: Any) -> str:
    """YAML on one line, without null settings."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_plain(item)}" for name, item in value.items() if item is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
