"""Compares a disturbed run with the same run undisturbed: weights to the bit, each prompt and each step once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.metrics_log import read_metrics

SHOWN = 5
FREE = ("_s", "_bytes", "_mb", "bubble_share")  # endings of figures that are times or sizes, different in any two runs


def differences(plain: RunDirectory, disturbed: RunDirectory) -> list[str]:
    """The differences, in sentences; empty if the disturbed run equals the undisturbed one."""
    return [*_weights(plain, disturbed), *_rollouts(plain, disturbed), *_metrics(plain, disturbed), *_left(disturbed)]


def _weights(plain: RunDirectory, disturbed: RunDirectory) -> list[str]:
    names = sorted(path.relative_to(plain.weights).as_posix() for path in plain.weights.rglob("*") if path.is_file())
    if not any(name.endswith(".safetensors") for name in names):
        return [f"{plain.weights} has no weights to compare"]
    unequal = [name for name in names if _bytes(plain.weights / name) != _bytes(disturbed.weights / name)]
    return [f"final weights differ: {', '.join(unequal[:SHOWN])}"] if unequal else []


def _rollouts(plain: RunDirectory, disturbed: RunDirectory) -> list[str]:
    due, got = _lines(plain.rollouts), _lines(disturbed.rollouts)
    trained = Counter(line["seq_id"] for line in got)
    found = []
    if missing := sorted({line["seq_id"] for line in due} - trained.keys()):
        found.append(f"{len(missing)} prompts were never trained: {missing[:SHOWN]}")
    if again := sorted(seq_id for seq_id, count in trained.items() if count > 1):
        found.append(f"{len(again)} prompts were trained more than once: {again[:SHOWN]}")
    if not found and got != due:
        number = next(
            (i for i, (a, b) in enumerate(zip(got, due, strict=False), start=1) if a != b), min(len(got), len(due)) + 1
        )
        found.append(f"rollouts differ from line {number} on ({len(got)} lines, undisturbed {len(due)})")
    return found


def _metrics(plain: RunDirectory, disturbed: RunDirectory) -> list[str]:
    due, got = read_metrics(plain.metrics), read_metrics(disturbed.metrics)
    steps = [line["step"] for line in got]
    if steps != [line["step"] for line in due]:
        return [f"steps of metrics.jsonl are {steps}, each should be there once up to {len(due)}"]
    unequal = sorted(
        {
            name
            for a, b in zip(due, got, strict=True)
            for name in a
            if not name.endswith(FREE) and a[name] != b.get(name)
        }
    )
    return [f"metrics differ: {', '.join(unequal[:SHOWN])}"] if unequal else []


def _left(disturbed: RunDirectory) -> list[str]:
    """Of writers that were killed."""
    strange = sorted(path.name for path in disturbed.checkpoints.iterdir() if not path.name.startswith("step-"))
    return [f"left in {disturbed.checkpoints}: {', '.join(strange[:SHOWN])}"] if strange else []


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
