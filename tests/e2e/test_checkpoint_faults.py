"""Checkpoints under attack: killed saves, full disks and changed files end in the same final weights or in a clear error."""

import json
import multiprocessing
import random
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.manifest import require_whole
from tests.e2e.jobs_checkpoint import FILES, AtByte, AtEvent, Fault, call, die_while_saving, resume_to_the_end, weights_digest
from tests.support.checkpoint_mutations import canary
from tests.support.ppo import SHAPE, Workspace, run_ppo_ranks
from tests.support.ranks import run_ranks

SMALL = SHAPE | {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 160}
SMALL_FILES = "tests.e2e.jobs_checkpoint:run_with_small_files"
STARTING = threading.Lock()


@dataclass(frozen=True)
class Begun:
    """A run that was stopped in its second step, its two checkpoints, and the final weights of the undisturbed run."""

    config: dict[str, Any]
    checkpoints: Path
    final_weights: str

    def again(self, run_dir: Path) -> dict[str, Any]:
        shutil.copytree(self.checkpoints.parent, run_dir)
        return self.config | {"run_dir": str(run_dir), "checkpoint": {**self.config["checkpoint"], "resume": True}}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    workspace = Workspace.create(tmp_path_factory.mktemp("faults"))
    roles = {name: {"init": SMALL} for seed, name in enumerate(("actor", "critic", "reward"))}
    config = workspace.config(
        "begun", **roles, steps=2,
        overlap={"intra": True, "inter": True, "delta": {"rule": "fixed", "initial": 2, "max": 2}, "chunk": [3, 16, 32, 64]},
        rollout={"batch_size": 3, "max_response_tokens": 12}, logging={"console": "off", "rollouts": True, "trace": False},
        checkpoint={"every_steps": 1, "keep": 3},
    )  # fmt: skip
    config["overlap"]["chunk"] = 3
    plain = config | {"run_dir": str(workspace.root / "runs" / "plain")}
    run_ppo_ranks(plain)
    assert run_ranks(1, "tests.e2e.jobs:train_until", config=config, rounds=7) == [False]
    checkpoints = Path(config["run_dir"]) / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    assert len(names) == 2 and names[0] == "step-000001" and names[1].startswith("step-000001-clock"), names
    assert (checkpoints / names[1] / "rollouts.jsonl").read_text().count("\n") > 2
    return Begun(config, checkpoints, weights_digest(Path(plain["run_dir"])))


@pytest.fixture(scope="module")
def servers() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.jobs_checkpoint", "oppo_megatron.train.entry"])
    return context


def in_a_process(servers: Any, job: Any, *args: Any) -> tuple[int, Any]:
    ours, theirs = servers.Pipe()
    process, until = servers.Process(target=call, args=(job, theirs, *args)), time.monotonic() + 60
    with STARTING:
        process.start()
    theirs.close()
    while True:
        with STARTING:  # a start looks after the processes of other threads, too
            if process.exitcode is not None:
                break
        assert time.monotonic() < until, "the process hangs"
        time.sleep(0.01)
    try:
        return process.exitcode, ours.recv() if ours.poll() else None
    except EOFError:
        return process.exitcode, None


def random_bytes(newest: Path, each: int) -> list[Fault]:
    rng = random.Random(5)
    sizes = {path.name: path.stat().st_size for path in newest.rglob("*") if path.is_file()}
    sizes[".metadata.tmp"] = sizes[".metadata"]
    return [AtByte(name, rng.randrange(sizes[name])) for name in FILES for _ in range(each)]


def strike(begun: Begun, servers: Any, run: Path, fault: Fault, to_the_end: bool) -> bool:
    """Return whether the fault struck; if so, resume the run (if files differ or `to_the_end`) to the same weights."""
    config = begun.again(run)
    code, _ = in_a_process(servers, die_while_saving, config, fault)
    if code == 0:
        return False
    assert code < 0, f"{fault}: exit code {code}"
    store = CheckpointStore(run / "checkpoints")
    assert store.positions() == CheckpointStore(begun.checkpoints).positions(), fault
    if to_the_end or contents(store.root) != contents(begun.checkpoints):
        code, weights = in_a_process(servers, resume_to_the_end, config)
        assert code == 0, f"{fault}: not resumable"
        assert weights == begun.final_weights, fault
    store.recover()
    assert all(path.name.startswith("step-") for path in store.root.iterdir()), fault
    for position in store.positions():
        require_whole(store.folder(position))
    shutil.rmtree(run)
    return True


def contents(checkpoints: Path) -> dict[str, bytes]:
    files = (path for path in checkpoints.glob("step-*/**/*") if path.is_file())
    return {path.relative_to(checkpoints).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize(("offsets_each", "events"), [(1, 16), pytest.param(3, 1, marks=pytest.mark.long)])
def test_killed_anywhere_in_a_save_the_run_continues_to_the_same_weights(
    begun: Begun, servers: Any, tmp_path: Path, offsets_each: int, events: int
) -> None:
    """A checkpoint replaces itself, so that the renaming is disturbed, too; every `events`th change of files is struck."""

    def hits(faults: Sequence[Fault]) -> list[bool]:
        places = [tmp_path / f"{type(fault).__name__}-{number}" for number, fault in enumerate(faults)]
        return list(pool.map(strike, repeat(begun), repeat(servers), places, faults, twelfth))

    twelfth = cycle([True] + [False] * 11)
    with ThreadPoolExecutor(2) as pool:
        at_bytes = random_bytes(sorted(begun.checkpoints.iterdir())[-1], offsets_each)
        assert all(hits(at_bytes)) and len(at_bytes) >= 7 * offsets_each
        num_events = 0
        while all(struck := hits([AtEvent(num_events + events * number) for number in range(4)])):
            num_events += 4 * events
    assert num_events + events * sum(struck) >= 15 and struck == sorted(struck, reverse=True)


def assert_ended_with_the_last_checkpoint_whole(begun: Begun, run: Path, answers: list[Any], reason: str) -> None:
    assert {kind for kind, _ in answers} == {"CheckpointError"}, answers
    newest = sorted(begun.checkpoints.iterdir())[-1].name
    for _, message in answers:
        for words in (reason, "takes about", "are free there", "checkpoint.keep", f"last whole checkpoint is {newest}"):
            assert words in message, message
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == sorted(path.name for path in begun.checkpoints.iterdir())


@pytest.mark.parametrize(("ranks", "limit"), [(1, 200), (1, 9_000), (2, 9_000)])
def test_files_that_cannot_be_written_leave_the_last_one_whole(begun: Begun, tmp_path: Path, ranks: int, limit: int) -> None:
    config = begun.again(tmp_path / "run") | {"placement": {"mode": "disaggregated" if ranks > 1 else "single"}}
    place = "oppo_megatron.train.saving.writing:CheckpointWriting.run"
    answers = run_ranks(ranks, SMALL_FILES, config=config, num_bytes=limit, within=place)
    assert_ended_with_the_last_checkpoint_whole(begun, tmp_path / "run", answers, "File too large")


@pytest.fixture
def small_disk(begun: Begun, tmp_path: Path) -> Iterator[Path]:
    sizes = [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in begun.checkpoints.iterdir()]
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(sizes) + min(sizes) // 2 + 200_000  # blocks are 4 KiB each
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip("a small file system cannot be mounted here: that needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole(begun: Begun, small_disk: Path) -> None:
    config = begun.again(small_disk / "run") | {"placement": {"mode": "disaggregated"}}
    answers = run_ranks(2, SMALL_FILES, config=config, num_bytes=0, within="")
    assert_ended_with_the_last_checkpoint_whole(begun, small_disk / "run", answers, "No space left on device")


def test_a_run_whose_last_checkpoint_cannot_be_written_has_ended_and_says_so(begun: Begun, tmp_path: Path) -> None:
    config = begun.again(tmp_path / "run")
    config |= {"checkpoint": config["checkpoint"] | {"every_steps": 0}, "logging": {"console": "plain"}}
    ((error, said),) = run_ranks(1, "tests.e2e.jobs_checkpoint:end_without_space_for_a_checkpoint", config=config)
    assert error == "" and "the run has ended, but cannot be given more steps later: " in said and "File too large" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert weights_digest(tmp_path / "run") == begun.final_weights
    assert contents(tmp_path / "run" / "checkpoints") == contents(begun.checkpoints)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(begun: Begun, tmp_path: Path) -> None:
    config = begun.again(tmp_path / "run") | {"placement": {"mode": "disaggregated"}}
    by_rank = run_ranks(2, "tests.e2e.jobs_checkpoint:resume_noting_syncs", config=config)
    store, position = CheckpointStore(tmp_path / "run" / "checkpoints"), Position(2)
    whole, aside = store.folder(position), store.aside(position)
    synced = [each for noted in by_rank for each in noted]
    (named_s,) = (seconds for seconds, path, changed in synced if path == str(whole) and changed == -1)
    before = {(path, changed) for seconds, path, changed in synced if seconds < named_s}
    parts = [whole, *whole.rglob("*")]
    assert len(parts) > 8 and len({path.name for path in (whole / "caches").iterdir()}) == 2
    for part in parts:
        assert (str(aside / part.relative_to(whole)), part.stat().st_mtime_ns) in before, part
    assert any(path == str(store.root) and seconds > named_s for seconds, path, changed in synced if changed != -1)


@pytest.mark.parametrize(("place", "num_bytes", "says"), [
    ("run_files:export_weights", 3000, "weights/actor: the weights could not be written \\(File too large\\)"),
    ("logs.journal:Journal.step", 100, "run: .*--resume"),
])  # fmt: skip
def test_files_that_cannot_be_written_are_reported(begun: Begun, tmp_path: Path, place: str, num_bytes: int, says: str) -> None:
    config = begun.again(tmp_path / "run")
    ((kind, message),) = run_ranks(1, SMALL_FILES, config=config, num_bytes=num_bytes, within=f"oppo_megatron.train.{place}")
    assert kind == "CheckpointError" and re.match(f"{tmp_path}/(run/)?{says}", message), message
    assert not list((tmp_path / "run" / "weights").glob("*")), "nothing is left"


@pytest.mark.parametrize("count", [50, pytest.param(110, marks=pytest.mark.long)])
def test_mutated_checkpoints_end_in_a_clear_error_or_the_one_before(begun: Begun, tmp_path: Path, count: int) -> None:
    """Damage within files; tests/unit/test_rundir_checkpoints.py has missing and exchanged files."""
    subject = {"config": begun.again(tmp_path / "run"), "pristine": str(begun.checkpoints)}
    (answers,) = run_ranks(1, "tests.e2e.jobs_checkpoint:resume_mutants", **subject, count=count, seed=3)
    assert not canary(tmp_path / "run" / "checkpoints" / "x").exists(), "a pickle of a checkpoint was run"
    pristine = answers.pop(0)
    assert pristine["resumed"] == pristine["newest"] and pristine["differs"] == [], pristine
    outcomes: Counter[str] = Counter()
    for answer in answers:
        assert "foreign" not in answer and answer["seconds"] < 30, answer
        if "error" in answer:
            assert answer["error"].startswith("CheckpointError: ") and len(answer["error"]) > 60, answer
            outcomes["error"] += 1
            continue
        back = answer["resumed"] != answer["newest"]
        assert back == ("is damaged" in answer["said"] and answer["newest"] in answer["said"]), answer
        assert answer.get("differs", []) == [], answer
        assert back or answer["weights"] == pristine["weights"], answer
        outcomes["the one before" if back else "accepted"] += 1
    assert min(outcomes["error"], outcomes["the one before"]) > count / 9 and outcomes["accepted"] < count / 4, outcomes
