"""Weights & Biases through its real library, without a network: what its files hold."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("wandb") is None:
    pytest.skip("wandb is not installed: `make test-wandb` installs it aside and runs this", allow_module_level=True)


def records(data: bytes) -> Iterator[bytes]:
    """Records in a file: seven bytes of head, then LevelDB's log format, blocks of 32 KiB of pieces."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def history(run_dir: Path) -> list[dict[str, str]]:
    """The rows that the run's offline file holds, by wandb's own protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return rows


RUN = """
import sys
from oppo_megatron.config.run import LoggingConfig
from oppo_megatron.train.logs.trackers import open_trackers

tracker = open_trackers(LoggingConfig(trackers=["wandb:rlhf"]), sys.argv[1])
for step in (1, 2):
    tracker.log(step, {"reward_mean": 0.5 * step, "idle_s": {"actor": 0.25}, "delta_reason": "text"})
    tracker.log(step, {"critic_update_s": 3.0})
tracker.close()
"""


def test_offline_files_hold_the_values(tmp_path: Path) -> None:
    """A process of its own, as a run is: wandb's service writes the last values when that ends."""
    run_dir = tmp_path / "run7"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("steps: 2\n")
    subprocess.run([sys.executable, "-c", RUN, str(run_dir)], check=True, capture_output=True, timeout=60)
    rows = [{key: float(value) for key, value in row.items() if key[0] != "_"} for row in history(run_dir)]
    assert rows == [{"reward_mean": 0.5 * step, "idle_s/actor": 0.25, "critic_update_s": 3.0} for step in (1, 2)]
    assert (run_dir / "wandb" / "run_id").read_text().strip() in str(next(run_dir.glob("wandb/offline-run-*")))
