"""Ranks that are forked from a process which has imported everything: they have what a process of their own would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oppo_megatron.cluster import rank_processes
from oppo_megatron.cluster.rank_processes import LONGEST_FOLDER, start_method
from tests.support.processes import python_path

ENTRY = """
import os, signal, sys, time

def run(kind, path):
    if kind == "surroundings":
        os.write(1, f"{os.environ.get('SET')} {os.environ.get('GONE')} {'oppo_megatron.train.entry' in sys.modules}\\n".encode())
        os.write(2, b"an error\\n")
        return 0
    told = []
    for number in signal.SIGTERM, signal.SIGUSR1:  # the latter is what the parent makes of the former
        signal.signal(number, lambda number, frame: told.append(number))
    os.write(1, b"ready\\n")
    while not told:
        time.sleep(0.05)
    return 0
"""

PARENT = """
import multiprocessing, os, sys
from types import SimpleNamespace
from oppo_megatron.cli.launch import launch

def at(kind):
    config = SimpleNamespace(runtime=SimpleNamespace(device=sys.argv[2], meeting_s=60.0))
    return launch(kind, config, 2, entry="entry_of_test:run")

if __name__ == "__main__":
    if sys.argv[1] == "stops":
        sys.exit(at("stops"))
    if sys.argv[3:]:  # someone else has begun the process that ranks are forked from
        first = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        first.start()
        first.join()
    os.environ["GONE"] = "there"
    assert at("surroundings") == 0
    del os.environ["GONE"]
    os.environ["SET"] = "new"
    with open("elsewhere", "w") as file:
        os.dup2(file.fileno(), 1)
    assert at("surroundings") == 0
"""


@pytest.mark.parametrize(
    ("device", "hidden", "driver", "expected"),
    [
        ("cpu", None, True, "forkserver"),
        ("auto", None, False, "forkserver"),
        ("auto", None, True, "spawn"),
        ("auto", "", True, "forkserver"),
        ("auto", "0", True, "spawn"),
        ("cuda", "", False, "spawn"),
    ],
)
def test_what_may_use_cuda_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, hidden: str | None, driver: bool, expected: str
) -> None:
    monkeypatch.setattr(rank_processes, "DRIVERS", (tmp_path / "none", tmp_path if driver else tmp_path / "none"))
    environment = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    config = SimpleNamespace(runtime=SimpleNamespace(device=device))
    assert start_method(config, environment) == expected
    monkeypatch.setattr(sys, "platform", "darwin")
    assert start_method(config, environment) == "spawn"


@pytest.mark.long
@pytest.mark.parametrize("excess", [0, 1])
def test_a_folder_for_temporary_files_may_have_a_long_name(monkeypatch: pytest.MonkeyPatch, folder: Path, excess: int) -> None:
    """A batch system's; the name of a socket is short."""
    temporary = folder / "x"
    temporary = temporary.with_name("x" * (LONGEST_FOLDER + excess - len(str(folder)) - 1))
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    parent = started(folder, "surroundings", "cpu")
    out, errors = parent.communicate(timeout=240)
    assert parent.returncode == 0, errors
    assert out.splitlines() == [f"None there {not excess}"] * 2
    assert not [*temporary.iterdir()], "nothing is left"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "entry_of_test.py").write_text(ENTRY)
    (tmp_path / "parent.py").write_text(PARENT)
    return tmp_path


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["PYTHONPATH"] = python_path(folder, root)
    command = [sys.executable, "parent.py", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


@pytest.mark.parametrize(
    ("device", "before", "imported"),
    [
        pytest.param("cpu", [], True, marks=pytest.mark.long),
        ("cpu", ["by another"], False),
        pytest.param("cuda", [], False, marks=pytest.mark.long),
    ],
    ids=["forked", "forked from what another began", "spawned"],
)
def test_ranks_have_the_environment_and_the_files_of_who_starts_them_now(
    folder: Path, device: str, before: list[str], imported: bool
) -> None:
    parent = started(folder, "surroundings", device, *before)
    out, errors = parent.communicate(timeout=240)
    assert parent.returncode == 0, errors
    assert out.splitlines() == [f"None there {imported}"] * 2
    assert (folder / "elsewhere").read_text().splitlines() == [f"new None {imported}"] * 2
    assert errors.splitlines() == ["an error"] * 4


def test_a_signal_to_the_whole_process_group_leaves_the_ranks_their_exit_codes(folder: Path) -> None:
    """Slurm or `kill -- -PGID` sends it; the process between would else die of it, and with it the ranks' exit codes."""
    parent = started(folder, "stops", "cpu")
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.killpg(parent.pid, signal.SIGTERM)
    _, errors = parent.communicate(timeout=240)
    assert parent.returncode == 0 and errors == "", errors
