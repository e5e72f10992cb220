"""Ctrl-C while a command imports: behind the import, never in the midst of it."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from oppo_megatron.cli.main import Command, main
from oppo_megatron.cli.signals import interrupts_behind_imports


@pytest.fixture(autouse=True)
def own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """A module that is told three times to stop while it is imported, and would swallow it."""
    (folder / f"{name}.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    for _ in range(3):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.03)\n"
        "    time.sleep(0.1)\n"
        "except KeyboardInterrupt as error:\n"
        "    raise RuntimeError('within the import') from error\n"
        "finished = True\n"
        "def add_arguments(parser): time.sleep(5)\n"
        "def run(args): return 0\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    return name


def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = interrupted_module(tmp_path, monkeypatch, "imported_while_told")
    with pytest.raises(KeyboardInterrupt), interrupts_behind_imports():
        importlib.import_module(name)
        time.sleep(5)
    assert sys.modules[name].finished is True
    time.sleep(0.2)  # no second one is under way


def test_one_that_still_waits_comes_with_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = interrupted_module(tmp_path, monkeypatch, "imported_last")
    with pytest.raises(KeyboardInterrupt), interrupts_behind_imports():
        importlib.import_module(name)
    assert sys.modules[name].finished is True
    time.sleep(0.2)  # it does not come again


def test_elsewhere_an_interrupt_is_heard_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupts_behind_imports():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert time.monotonic() - started < 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_ignores_interrupts_goes_on_ignoring_them() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_behind_imports():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_command_that_is_being_imported_ends_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = interrupted_module(tmp_path, monkeypatch, "command_while_told")
    row = Command("slow", name, "a command")
    monkeypatch.setattr("oppo_megatron.cli.main.COMMANDS", (row,))
    assert main(["slow"]) == 130
    assert capsys.readouterr().err == "oppo: interrupted\n"
