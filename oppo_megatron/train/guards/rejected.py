"""Rejected batches: all inputs of one update, written when a guard rejects it, and read by `tools/replay.py`.

`step-N.safetensors` holds the tensors (`TENSORS`), `step-N.jsonl` beside it a first line about the step and then a line
about each rollout.  The files hold numbers and text only, no pickle.

Legend: B rollouts, P their prompt tokens, T their response tokens (both packed), G greedy responses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from oppo_megatron.algorithms.experience import GreedyRows, ScoredBatch
from oppo_megatron.errors import DataError
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.rundir.directory import atomic_writer, encode_json
from oppo_megatron.rundir.metrics_log import iter_json_lines

FORMAT = "oppo rejected batch 1"
TENSORS = {
    "prompt_lengths_B": torch.int64, "prompt_tokens_P": torch.int64, "lengths_B": torch.int64, "tokens_T": torch.int64,
    "versions_T": torch.int64, "behaviour_logp_T": torch.float64, "reference_logp_T": torch.float32,
    "values_T": torch.float32, "scores_B": torch.float32, "truncated_B": torch.bool, "step_rewards_T": torch.float32,
    "greedy_scores_G": torch.float32, "greedy_lengths_G": torch.int64, "greedy_truncated_G": torch.bool,
}  # fmt: skip
OPTIONAL = ("reference_logp_T", "values_T", "step_rewards_T")
"""May be empty: there was no such role, or scores are of whole responses."""
SOMETIMES = ("step_rewards_T", "greedy_scores_G", "greedy_lengths_G", "greedy_truncated_G")
"""May be missing: scores are of whole responses, and no greedy response is their baseline."""
NUMBERS: dict[str, type | tuple[type, ...]] = {
    "step": int, "seed": int, "total_steps": int, "policy_version": int, "kl_coefficient": (int, float), "config": str,
    "reason": str, "figures": dict, "history": dict,
}  # fmt: skip
LEAST: dict[str, int] = {"step": 1, "total_steps": 1}  # of these numbers; of the others 0


@dataclass(frozen=True)
class Facts:
    """The step: `policy_version` of the actor before its update, the run's `config` as YAML, its statistics (`figures`),
    and the `history` that the run remembered of the steps before (`History`)."""

    step: int
    seed: int
    total_steps: int
    policy_version: int
    kl_coefficient: float
    config: str
    reason: str
    figures: dict[str, float | None]
    history: dict[str, float | None]


@dataclass(frozen=True)
class RejectedBatch:
    """What one update of actor and critic was, or would have been, made from."""

    facts: Facts
    batch: Sequence[Rollout]
    scored: ScoredBatch

    def write(self, path: Path) -> None:
        """Write `path` (.safetensors) and the .jsonl beside it, each whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path.with_suffix(".jsonl")) as lines:
            lines.write(encode_json({"format": FORMAT, **vars(self.facts)}) + "\n")
            for rollout, score in zip(self.batch, self.scored.scores_B.tolist(), strict=True):
                lines.write(encode_json(_described(rollout, score)) + "\n")
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:  # not by the library, whose error of a full disk is none of the system's
                file.write(save(self._tensors(), metadata={"format": FORMAT}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def _tensors(self) -> dict[str, Tensor]:
        rollouts, scored = self.batch, self.scored
        tensors = {
            "prompt_lengths_B": torch.tensor([len(r.prompt.tokens) for r in rollouts]),
            "prompt_tokens_P": torch.tensor([t for r in rollouts for t in r.prompt.tokens]),
            "lengths_B": torch.tensor([len(r.tokens) for r in rollouts]),
            "tokens_T": torch.tensor([t for r in rollouts for t in r.tokens]),
            "versions_T": torch.tensor([v for r in rollouts for v in r.versions]),
            "behaviour_logp_T": torch.tensor([x for r in rollouts for x in r.logprobs], dtype=torch.float64),
            "reference_logp_T": torch.empty(0) if scored.reference_logp_T is None else scored.reference_logp_T,
            "values_T": torch.empty(0) if scored.values_T is None else scored.values_T,
            "scores_B": scored.scores_B,
            "truncated_B": scored.truncated_B,
        }
        if scored.step_rewards_T is not None:
            tensors["step_rewards_T"] = scored.step_rewards_T
        if scored.greedy is not None:
            tensors |= {f"greedy_{name}": tensor for name, tensor in vars(scored.greedy).items()}
        return {name: tensor.detach().to("cpu", TENSORS[name]).contiguous() for name, tensor in tensors.items()}


def read_rejected(path: Path) -> RejectedBatch:
    """Read a batch written by `write`; `path` is either file.  Raises DataError for damaged or other files."""
    path = path.with_suffix(".safetensors")
    lines = list(iter_json_lines(path.with_suffix(".jsonl")))
    head = {"history": {}} | (lines[0] if lines else {})  # older ones have none
    if head.get("format") != FORMAT:
        raise _unusable(path, f"its .jsonl does not begin with format {FORMAT!r}")
    _check_head(path, head)
    try:
        tensors = {name: torch.empty(0, dtype=TENSORS[name]) for name in SOMETIMES} | load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unusable(path, str(error)) from error
    _check_tensors(path, tensors, len(lines) - 1)
    rollouts = _rollouts(path, tensors, lines[1:])
    scored = ScoredBatch(
        behaviour_logp_T=tensors["behaviour_logp_T"].float(),
        reference_logp_T=tensors["reference_logp_T"] if len(tensors["reference_logp_T"]) else None,
        values_T=tensors["values_T"] if len(tensors["values_T"]) else None,
        scores_B=tensors["scores_B"],
        lengths_B=tensors["lengths_B"].tolist(),
        truncated_B=tensors["truncated_B"],
        step_rewards_T=tensors["step_rewards_T"] if len(tensors["step_rewards_T"]) else None,
        greedy=GreedyRows(*(tensors[name] for name in SOMETIMES[1:])) if len(tensors["greedy_scores_G"]) else None,
        tokens_T=torch.tensor([x for rollout in rollouts for x in rollout.tokens]),
        versions_T=torch.tensor([x for rollout in rollouts for x in rollout.versions]),
    )
    return RejectedBatch(Facts(**{name: head[name] for name in NUMBERS}), rollouts, scored)


def _check_head(path: Path, head: Mapping[str, Any]) -> None:
    for name in NUMBERS:
        if not _is_sound(name, head.get(name)):
            raise _unusable(path, f"{name} is {head.get(name)!r:.60}")
    if head["step"] > head["total_steps"]:
        raise _unusable(path, f"its step {head['step']} is beyond total_steps {head['total_steps']}")


def _is_sound(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, NUMBERS[name]):
        return False
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode() == value
    if isinstance(value, dict):
        return all(x is None or (isinstance(x, (int, float)) and abs(x) < math.inf) for x in value.values())
    return isinstance(value, (int, float)) and LEAST.get(name, 0) <= value < 2**63


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], num_rollouts: int) -> None:
    for name, dtype in TENSORS.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != dtype or tensor.dim() != 1:
            raise _unusable(path, f"{name} is missing or of another kind")
    counts = {"B": num_rollouts, "P": 0, "T": 0, "G": len(tensors["greedy_scores_G"])}
    if counts["G"] and num_rollouts % counts["G"]:
        raise _unusable(path, f"{num_rollouts} rollouts are no whole groups of {counts['G']} prompts")
    for name, axis in (("prompt_lengths_B", "P"), ("lengths_B", "T")):
        if bool((tensors[name] < 1).any()) or bool((tensors[name] > 2**31).any()):
            raise _unusable(path, f"{name} has a length below 1 or beyond reason")
        counts[axis] = int(tensors[name].sum())
    for name in ("prompt_tokens_P", "tokens_T", "versions_T"):
        if bool((tensors[name] < 0).any()):
            raise _unusable(path, f"{name} has a number below 0")
    for name in TENSORS:
        if name in OPTIONAL and not len(tensors[name]):
            continue
        if len(tensors[name]) != counts[name[-1]] or not num_rollouts:
            raise _unusable(path, f"{name} has {len(tensors[name])} entries, where {counts[name[-1]]} belong")


def _rollouts(path: Path, tensors: Mapping[str, Tensor], lines: Sequence[Mapping[str, Any]]) -> list[Rollout]:
    lengths = tensors["lengths_B"].tolist()
    prompts = tensors["prompt_tokens_P"].split(tensors["prompt_lengths_B"].tolist())
    parts = [tensors[name].split(lengths) for name in ("tokens_T", "versions_T", "behaviour_logp_T")]
    rollouts = []
    for i, (line, prompt, tokens, versions, logp) in enumerate(zip(lines, prompts, *parts, strict=True)):
        seq_id, text = line.get("seq_id"), line.get("prompt")
        if not isinstance(seq_id, int) or not isinstance(text, str):
            raise _unusable(path, f"line {i + 2} of its .jsonl has no seq_id or no prompt")
        record = Prompt(seq_id, -1, text, tuple(prompt.tolist()))
        rollouts.append(Rollout(record, i, tokens.tolist(), logp.tolist(), logp.tolist(), versions.tolist()))
    return rollouts


def _described(rollout: Rollout, score: float) -> dict[str, Any]:
    return {
        "seq_id": rollout.seq_id,
        "prompt": rollout.prompt.text,
        "score": score,
        "response_tokens": len(rollout.tokens),
        "oldest_version": min(rollout.versions),
        "deferrals": rollout.deferrals,
        "finish_reason": rollout.finish_reason,
    }


def _unusable(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is no whole rejected batch ({why}); name a step-N.safetensors that a run wrote to `rejected/`, its .jsonl "
        "beside it"
    )
