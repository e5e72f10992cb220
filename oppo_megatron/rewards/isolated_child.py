"""Process of `isolation.IsolatedFunction`: python -m oppo_megatron.rewards.isolated_child READ_FD WRITE_FD"""

from __future__ import annotations

import io
import json
import numbers
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from oppo_megatron.errors import ConfigError
from oppo_megatron.plugins import load_entry_point, said_of
from oppo_megatron.processes import allow_processor_time, end_with_parent, limit_resource

MAX_ANSWER_BYTES = 1 << 16
SHOWN_CHARACTERS = 1000
MARK = "OPPO_ISOLATED"
"""Environment variable by whose value this process's descendants are found and ended."""
END_S = 2.0
MAX_DESCRIPTORS = 1 << 16


def main(reads: int, writes: int) -> None:
    """Load the function of the first line, then answer each line."""
    for descriptor in (reads, writes):
        os.set_inheritable(descriptor, False)
    with os.fdopen(reads, "rb") as calls, os.fdopen(writes, "wb") as answers:
        task, own = json.loads(calls.readline()), os.getpid()
        _watch()
        end_with_parent(task["parent"])  # nobody else would end a function that never returns
        limit_resource(resource.RLIMIT_CORE, 0)
        limit_resource(resource.RLIMIT_AS, task["memory_bytes"])
        try:
            function = load_entry_point(task["entry_point"], task["options"])
        except ConfigError as error:
            _answer(answers, task, {"error": error.problems[0]})
            return
        _answer(answers, task, {"ready": True})
        for line in calls:
            allow_processor_time(task["cpu_s"])
            call = json.loads(line)
            answer = _call(function, call, task["options"])
            if os.getpid() != own:  # a copy of this process, which the function has made and let return
                os._exit(0)
            _answer(answers, call, answer)


def _watch() -> None:
    """Start a process that kills the function's descendants after this one ends, because a killed run cannot."""
    try:
        ended = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # Linux before 5.3, or another system: there it outlives such a run
        return
    if (between := os.fork()) == 0:
        if os.fork() == 0:
            os.setsid()
            os.dup2(ended, 0)
            os.closerange(1, MAX_DESCRIPTORS)  # whoever reads from their other ends waits until all have closed them
            select.select([0], [], [])
            end_marked(f"{MARK}={os.environ[MARK]}".encode())
        os._exit(0)
    os.waitpid(between, 0)
    os.close(ended)


def end_marked(mark: bytes) -> None:
    """For at most END_S, kill all other local processes with `mark` in their environment."""
    until = time.monotonic() + END_S
    while time.monotonic() < until and (marked := [pid for pid in psutil.pids() if mark in _environment_of(pid)]):
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _environment_of(pid: int) -> bytes:
    with suppress(OSError):
        return b"" if pid == os.getpid() else Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _call(function: Any, call: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    try:
        value = function(call["prompt"], call["response"], call["fields"], **options)
        if not isinstance(value, numbers.Real):
            return {"error": f"it gave {str(value)[:SHOWN_CHARACTERS]} ({type(value).__name__}), not a number"}
        return {"value": float(value)}
    except Exception as error:  # a user's function may raise anything; all of it is an answer
        return {"error": said_of(error)}


def _answer(answers: io.BufferedWriter, call: dict[str, Any], answer: dict[str, Any]) -> None:
    answers.write(json.dumps({**answer, "call": call["call"]}).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
