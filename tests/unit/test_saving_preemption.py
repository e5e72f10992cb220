"""A rank's treatment of signals while it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from oppo_megatron.train.saving.preemption import ECHO_S, HEARD, TORCHRUN, Preemption


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    before = {number: signal.getsignal(number) for number in HEARD}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("ranks", "fails", "ignored"), [(2, True, True), (2, False, False), (1, True, False)])
def test_a_rank_that_fails_among_peers_lives_to_say_why(
    monkeypatch: pytest.MonkeyPatch, ranks: int, fails: bool, ignored: bool
) -> None:
    """torch's agent, which has seen its peer end, sends it SIGTERM at that very moment."""
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    with pytest.raises(ZeroDivisionError) if fails else Preemption().listening():
        if fails:
            with Preemption().listening():
                raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGTERM) is signal.SIG_IGN) == ignored


def test_a_process_without_peers_hears_ctrl_c_again_once_its_run_is_over(
    monkeypatch: pytest.MonkeyPatch, handlers: dict[int, Any]
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    preemption = Preemption()
    with preemption.listening():
        preemption.ask()
    assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.parametrize(("by_torchrun", "apart_s", "ended"), [(False, 0.0, True), (True, 0.0, False), (True, ECHO_S, True)])
def test_the_second_ctrl_c_ends_a_rank_but_not_the_echo_of_the_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], by_torchrun: bool, apart_s: float, ended: bool
) -> None:
    """A terminal sends it to torchrun and its ranks, and torchrun passes it on to the ranks."""
    times, codes = iter([100.0, 100.0 + apart_s]), []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr("oppo_megatron.train.saving.preemption.time.monotonic", lambda: next(times, 200.0))
    monkeypatch.setattr(os, "_exit", codes.append)
    if by_torchrun:
        monkeypatch.setenv(TORCHRUN, "7")
    else:
        monkeypatch.delenv(TORCHRUN, raising=False)
    preemption, threads = Preemption(), threading.enumerate()
    with preemption.listening():
        (ear,) = set(threading.enumerate()).difference(threads)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
    ear.join(60)  # it hears all that came before the block's end
    preemption.saved()
    assert not ear.is_alive()
    assert preemption.asked and codes == ([130] if ended else [])
    assert capfd.readouterr().err.count("interrupted: the run saves what it has trained") == 1


def test_hang_ups_ask_once_and_are_left_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed terminal's come twice, from the shell and from the kernel; `nohup` ignores them."""
    codes: list[int] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(os, "_exit", codes.append)
    preemption, threads = Preemption(), threading.enumerate()
    with preemption.listening():
        (ear,) = set(threading.enumerate()).difference(threads)
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
    ear.join(60)
    preemption.saved()
    assert preemption.asked and not codes
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Preemption().listening():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_without_a_deadline_signals_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    before = {number: signal.getsignal(number) for number in HEARD}
    with Preemption(0.0).listening():
        assert {number: signal.getsignal(number) for number in HEARD} == before
    assert {number: signal.getsignal(number) for number in HEARD} == before
    with Preemption(1.0).listening():
        assert all(signal.getsignal(number) != handler for number, handler in before.items())
