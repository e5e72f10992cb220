"""The chaos command's judgement: what a rank was at, and what it finds different between two runs."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oppo_megatron.rundir.directory import RunDirectory
from tools.chaos import Victims, differences, phase_of

ENTRY = '  File "/x/oppo_megatron/train/entry.py", line 40 in run_rank\n  File "/x/oppo_megatron/cli/launch.py", line 9 in f\n'
THREAD = 'Thread 0x1 (most recent call first):\n  File "/usr/lib/threading.py", line 5 in wait\n\n'


@pytest.mark.parametrize(("frames", "phase", "where"), [
    ("train/saving/writing.py:9:_seal train/saving/saver.py:8:save", "saving", "train/saving/writing.py in _seal"),
    ("train/saving/state.py:9:lines train/saving/saver.py:8:save", "saving", "train/saving/state.py in lines"),
    ("engine/stream.py:3:take engine/round_runner.py:1:run train/loop.py:7:_step", "decode", "engine/stream.py in take"),
    ("mcore/training.py:3:step train/update.py:1:run_update", "update", "mcore/training.py in step"),
    ("train/saving/writing.py:3:load train/loop.py:1:restore", "restoring", "train/saving/writing.py in load"),
    ("cluster/rendezvous.py:3:meet cluster/world.py:1:open_world", "start-up", "cluster/rendezvous.py in meet"),
])  # fmt: skip
def test_what_a_rank_was_at(frames: str, phase: str, where: str) -> None:
    stack = "Current thread 0x2 (most recent call first):\n"
    for frame in frames.split():
        file, line, function = frame.split(":")
        stack += f'  File "/x/oppo_megatron/{file}", line {line} in {function}\n'
    assert phase_of(f"some message\n{THREAD}{stack}{ENTRY}") == (phase, where)
    assert phase_of("") == ("unknown", "")


def run(root: Path, name: str) -> RunDirectory:
    directory = RunDirectory(root / name)
    (directory.weights / "actor").mkdir(parents=True)
    directory.checkpoints.mkdir()
    (directory.checkpoints / "step-000002").mkdir()
    (directory.weights / "actor" / "model.safetensors").write_bytes(b"weights")
    lines = [{"step": 1 + number // 2, "seq_id": number, "tokens": [number]} for number in range(4)]
    directory.rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [{"step": step, "actor_loss": 0.5, "step_s": len(name) * step} for step in (1, 2)]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    return directory


def repeat_a_line(path: Path) -> None:
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")


def drop_a_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_no_kill_waits_for_more_steps_than_it_was_drawn_after(tmp_path: Path) -> None:
    process: Any = SimpleNamespace(poll=lambda: None)
    begun, victims = time.monotonic(), Victims(os.getpid(), run(tmp_path, "of two steps"), tmp_path, 1)
    assert not victims.sleep(process, 60.0, 2) and time.monotonic() - begun < 30


def test_runs_that_differ_in_times_only_are_the_same(tmp_path: Path) -> None:
    assert differences(run(tmp_path, "a"), run(tmp_path, "bb")) == []


@pytest.mark.parametrize(("file", "damage", "words"), [
    ("weights/actor/model.safetensors", lambda path: path.write_bytes(b"weighty"), "weights differ: actor/model"),
    ("weights/actor/model.safetensors", Path.unlink, "weights differ: actor/model"),
    ("rollouts.jsonl", repeat_a_line, r"1 prompts were trained more than once: \[3\]"),
    ("rollouts.jsonl", drop_a_line, r"1 prompts were never trained: \[3\]"),
    ("rollouts.jsonl", lambda path: path.write_text(path.read_text().replace("[2]", "[9]")), "from line 3 on"),
    ("metrics.jsonl", repeat_a_line, r"\[1, 2, 2\], each should be there once"),
    ("metrics.jsonl", lambda path: path.write_text(path.read_text().replace("0.5", "0.6")), "differ: actor_loss"),
    ("checkpoints/.step-000003", Path.mkdir, "left in .*: .step-000003"),
])  # fmt: skip
def test_differences_are_found(tmp_path: Path, file: str, damage: Callable[[Path], None], words: str) -> None:
    plain, disturbed = run(tmp_path, "a"), run(tmp_path, "b")
    damage(disturbed.path / file)
    found = differences(plain, disturbed)
    assert len(found) == 1 and re.search(words, found[0]), found
