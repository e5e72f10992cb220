"""Processes that end with who started them, signals that come meanwhile, and the pool of ranks of these tests."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from oppo_megatron.cli.signals import SignalRelay, ending_by_signal
from oppo_megatron.errors import EXIT_REQUEUE
from oppo_megatron.processes import hears, signals_held, started
from tests.support.processes import runs, wait_for
from tests.support.ranks import RankPool

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def signals_while_starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Signals that this process gets when another one runs, and its starter does not have it yet."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # torch's launcher leaves one of its own behind
    start = subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*args, **options)
        for number in numbers:
            os.kill(os.getpid(), number)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    yield numbers
    signal.signal(signal.SIGINT, before)


def sleepers() -> list[psutil.Process]:
    """Processes of other tests may end meanwhile, and are then asked in vain."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.cmdline() == SLEEP:
                found.append(child)
    return found


@pytest.mark.parametrize(("numbers", "expected"), [
    ([signal.SIGTERM], "143"), ([signal.SIGHUP], "129"), ([signal.SIGINT], "^$"), ([signal.SIGTERM, signal.SIGHUP], "129|143"),
])  # fmt: skip
def test_a_signal_that_comes_with_the_start_ends_the_process_too(
    tmp_path: Path, signals_while_starting: list[int], numbers: list[int], expected: str
) -> None:
    before = [*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))]
    signals_while_starting += numbers
    with pytest.raises((SystemExit, KeyboardInterrupt), match=expected), ending_by_signal():
        with started(SLEEP, tmp_path / "log"):
            raise AssertionError("what came with the start is told before anything else is done")
    assert not sleepers() and [*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))] == before


def test_what_ends_the_block_ends_the_process_and_a_missing_program_leaves_the_handlers(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), started(SLEEP, tmp_path / "log") as process:
        raise RuntimeError
    assert process.returncode == -signal.SIGTERM
    with ending_by_signal():
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(FileNotFoundError, match="no program"), started([tmp_path / "no program"], tmp_path / "log"):
            pass
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_is_ignored_stays_ignored_here_and_in_the_process(tmp_path: Path) -> None:
    script = "import signal; print(signal.getsignal(signal.SIGHUP).name, signal.getsignal(signal.SIGTERM).name)"
    with ending_by_signal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with started([sys.executable, "-c", script], tmp_path / "log") as process:
            assert process.wait() == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert (tmp_path / "log").read_text().split() == ["SIG_IGN", "SIG_DFL"]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_by_signal(), SignalRelay().listening():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not hears(signal.SIGHUP)
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_hangs_up_twice_and_is_written_to_in_vain(tmp_path: Path) -> None:
    """Shell and kernel each send SIGHUP, which is one request to save; a line for the terminal is no error."""
    script = (
        "import signal, subprocess, sys, time; from oppo_megatron.cli.signals import SignalRelay\n"
        "from oppo_megatron.processes import outlive_terminal\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"  # inherited: this rank saves without end
        "rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', 'multiprocessing.spawn'])\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_DFL); outlive_terminal(); relay = SignalRelay()\n"
        "with relay.listening():\n"
        "    print('ready', flush=True)\n"
        "    while relay.asked_s() is None: time.sleep(0.01)\n"
        "time.sleep(0.1); rank.kill(); print('saved', flush=True); print('saved', file=sys.stderr)\n"
        f"open({str(tmp_path / 'code')!r}, 'w').write(str(relay.code))"
    )
    ours, theirs = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 5) == b"ready"
    os.close(ours)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0 and (tmp_path / "code").read_text() == str(EXIT_REQUEUE)


def test_what_is_started_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from oppo_megatron.processes import started\n"
        f"with started({SLEEP!r}, Path({str(tmp_path / 'log')!r}), own_session=True) as process:\n"
        "    print(process.pid, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(starter.stdout.readline())
    assert runs(pid)
    starter.kill()
    starter.communicate()
    wait_for(lambda: not runs(pid), 15)


def test_another_thread_can_start_one(tmp_path: Path) -> None:
    def run() -> int:
        with started([sys.executable, "-c", "raise SystemExit(7)"], tmp_path / "log") as process:
            return process.wait()

    with ThreadPoolExecutor() as pool:
        assert pool.submit(run).result() == 7


def test_signals_wait_for_the_end_of_a_block() -> None:
    before, done = signal.signal(signal.SIGINT, signal.default_int_handler), []
    try:
        with pytest.raises(KeyboardInterrupt):
            with signals_held():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("the block")
            done.append("what is behind it")
        assert done == ["the block"] and signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with closing(RankPool()) as own:
        yield own


def where_ranks_met() -> str:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.FileStore)
    return str(store.path)


def sleep_in_vain(asleep: Path) -> None:
    asleep.touch()
    time.sleep(60)


def test_ranks_that_have_answered_still_have_a_folder_to_leave_their_store_in(pool: RankPool) -> None:
    """torch's store looks for its file as it goes: were the folder removed in that moment, it would wait until time-out."""
    first, second = (Path(pool.run(1, "tests.unit.test_processes:where_ranks_met", 60.0, {})[0]) for _ in range(2))
    assert first != second and first.parent.is_dir()
    pool.close()
    assert not first.parent.exists()


def test_where_a_rank_is_that_does_not_answer(pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep, collect = tmp_path / "asleep", pool._collect

    def hurried(world: int, deadline: float, worst: str) -> list[tuple[str, Any]]:
        wait_for(asleep.exists, deadline - time.monotonic())
        return collect(world, time.monotonic(), worst)

    monkeypatch.setattr(pool, "_collect", hurried)
    with pytest.raises(AssertionError, match=r"(?s)rank 0: no answer in time; it is in.*sleep_in_vain"):
        pool.run(1, "tests.unit.test_processes:sleep_in_vain", 120.0, {"asleep": asleep})
