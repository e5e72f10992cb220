"""`oppo train` in processes of its own, as a user starts it; something may befall its ranks.
As a script (CONFIG.yaml) it makes saves last long where run_dir has a file `slow`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from oppo_megatron.cli.launch import launch
from oppo_megatron.cluster import world
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine.executor import Executor
from oppo_megatron.errors import OppoError
from oppo_megatron.layout import placements
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.train import entry
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.roles import TrainedRole
from oppo_megatron.train.saving import writing
from oppo_megatron.train.score_exchange import ScoreExchange
from tests.support.configs import run_of
from tests.support.processes import runs

Run = subprocess.Popen[str]


def start(config: dict[str, Any], *options: str, module: str = "oppo_megatron train", new_session: bool = False) -> Run:
    """Start `oppo train` of a configuration, written next to its run directory; `new_session`: in its own process group."""
    run_dir = Path(config["run_dir"])
    path = run_dir.with_name(f"{run_dir.name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", *module.split(), str(path), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=new_session)


def num_lines(config: dict[str, Any]) -> int:
    path = Path(config["run_dir"]) / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until(run: Run, what: Any, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < until, "the run does not come on"
        time.sleep(0.02)


def rank_pids(config: dict[str, Any]) -> list[int]:
    ranks = json.loads((Path(config["run_dir"]) / "hosts.json").read_text())["ranks"]
    return [rank["pid"] for rank in ranks]


def still_there(pids: list[int]) -> list[int]:
    return [pid for pid in pids if runs(pid)]


def fault(config: dict[str, Any], at: str, rank: int, how: str) -> None:
    run_dir = Path(config["run_dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "fault").write_text(json.dumps({"at": at, "rank": rank, "how": how}))


def struck(config: dict[str, Any], at: str, rank: int, how: str) -> tuple[str, float]:
    """Start a run with a fault; return its errors and the seconds from the fault to its end, which must leave no ranks behind."""
    fault(config, at, rank, how)
    run = start(config, module="tests.e2e.started")
    path = Path(config["run_dir"]) / "fault"
    wait_until(run, lambda: not path.exists())
    came = time.monotonic()
    pids = rank_pids(config)
    _, told = run.communicate(timeout=120)
    seconds = time.monotonic() - came
    assert run.returncode == 2 and "Traceback" not in told, told
    assert not still_there(pids), told
    return told, seconds


PLACES: dict[str, tuple[Any, str, int]] = {
    "meeting": (world, "meet", 1), "start": (entry, "build_loop", 1), "round": (Executor, "run", 8),
    "scoring": (ScoreExchange, "gather", 2), "update": (TrainedModel, "step", 6), "evaluation": (Evaluator, "measure", 2),
    "checkpoint": (writing, "write_models", 2), "asynchronous": (writing, "write_models", 2),
    "installation": (TrainedRole, "publish", 2),
}  # fmt: skip
"""Where a fault strikes: the function, and at which call of it."""


def run_rank(kind: str, config: TrainConfig) -> int:
    """A rank of `oppo train`, killed or stopped by a signal, made to hang, or with slow saves, where run_dir tells so."""
    path = Path(config.run_dir) / "fault"
    fault = json.loads(path.read_text()) if path.exists() else {"at": "checkpoint", "rank": None, "how": "slow"}
    where, name, number = PLACES[fault["at"]]
    original, calls = getattr(where, name), 0

    def struck(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if fault["how"] == "slow" and path.with_name("slow").exists():
            path.with_name("saving").touch()
            time.sleep(600)
        if calls == number and int(os.environ["RANK"]) == fault["rank"]:
            path.unlink()
            if fault["how"] == "hangs":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL if fault["how"] == "killed" else signal.SIGSTOP)
        return original(*args, **options)

    with mock.patch.object(where, name, struck):
        return entry.run_rank(kind, config)


if __name__ == "__main__":
    settings = run_of(yaml.safe_load(Path(sys.argv[1]).read_text()))
    try:
        sys.exit(launch("train", settings, placements.world_size(settings), entry="tests.e2e.started:run_rank"))
    except OppoError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
