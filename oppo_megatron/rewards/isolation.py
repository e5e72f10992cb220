"""A reward function in its own process with limits, against accidents; it is not a sandbox. Both exchange JSON lines."""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from oppo_megatron.config.rewards import START_S, Limits
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.nesting import read_json
from oppo_megatron.rewards.isolated_child import MARK, MAX_ANSWER_BYTES, end_marked
from oppo_megatron.rewards.parts import Fields, Part
from oppo_megatron.rewards.protocol import ScoreItem, check_fields

CHILD = "oppo_megatron.rewards.isolated_child"
END_S = 2.0
SHOWN_BYTES = 1 << 16
"""Output of a process that is shown, because a function may print for each of a million responses."""


class Unanswered(RewardError):
    """A call exceeded the limits or ended its process."""


class IsolatedFunction(Part):
    """`entry_point` with `options`, as a function of (prompt, response, fields); restarts after a failure.

    Use one thread: PR_SET_PDEATHSIG ends the process with the thread that started it (prctl(2)).
    """

    def __init__(
        self, entry_point: str, options: Mapping[str, Any], limits: Limits, environment: Mapping[str, str],
        cpu_s: int | None = None,
    ):  # fmt: skip
        self.entry_point, self.options, self.limits = entry_point, dict(options), limits
        self._cpu_s = math.ceil(limits.wall_s) if cpu_s is None else cpu_s
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._thread = self._to_child = self._from_child = -1
        self._shows: threading.Thread | None = None

    def try_start(self) -> None:
        """Raise ConfigError if the function cannot be loaded."""
        try:
            self._start()
        except RewardError as error:
            raise ConfigError(f"{error}; correct entry_point, or raise the limit of isolate") from error
        self.close()

    def check(self, fields: Fields) -> None:
        check_fields(fields)

    def score(self, item: ScoreItem, num_tokens: int | None) -> float:
        return self(item.prompt, item.response, item.fields)

    def __call__(self, prompt: str, response: str, fields: Fields) -> float:
        """Raises RewardError naming the function, or Unanswered for a later crash or limit."""
        if self._process is None:
            self._start()
        assert threading.get_ident() == self._thread, f"{self.entry_point} is called from the thread that started it"
        call = {"prompt": prompt, "response": response, "fields": dict(fields)}
        answer = self._ask(call, self.limits.wall_s, f"{self.entry_point} gave no score within timeout_s")
        if "error" in answer:
            raise RewardError(f"{self.entry_point} failed in its process: {answer['error']}")
        return float(answer["value"])

    def interrupt(self) -> None:
        """Kill the process, from any thread; a pending call fails."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and everything it started, even in other sessions."""
        if self._process is None:
            return
        self.interrupt()
        self._process.wait()
        end_marked(f"{MARK}={self._mark}".encode())
        os.close(self._to_child)
        os.close(self._from_child)
        if self._shows is not None:
            self._shows.join(END_S)  # what it printed comes before what is said of its end
        self._process = None

    def _start(self) -> None:
        self._thread, self._mark = threading.get_ident(), secrets.token_hex(8)
        child_reads, self._to_child = os.pipe()
        self._from_child, child_writes = os.pipe()
        printed, child_prints = os.pipe()
        self._process = subprocess.Popen(  # noqa: S603  (this package's own module, and no shell)
            [sys.executable, "-m", CHILD, str(child_reads), str(child_writes)],
            stdin=subprocess.DEVNULL,
            stdout=child_prints,  # the function's prints are not answers
            stderr=child_prints,
            pass_fds=(child_reads, child_writes),
            env=self._environment | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), MARK: self._mark},
            start_new_session=True,
        )
        for descriptor in (child_reads, child_writes, child_prints):
            os.close(descriptor)
        self._shows = threading.Thread(target=_show, args=(printed, self.entry_point), name="isolated output", daemon=True)
        self._shows.start()
        os.set_blocking(self._to_child, False)
        task = {
            "entry_point": self.entry_point,
            "options": self.options,
            "cpu_s": self._cpu_s,
            "memory_bytes": self.limits.memory_mb << 20,
            "parent": os.getpid(),
        }
        try:
            answer = self._ask(task, START_S, f"{self.entry_point} was not loaded within")
        except Unanswered as error:
            raise RewardError(str(error)) from error
        if answer.get("ready") is not True:
            self.close()
            raise RewardError(f"{self.entry_point} cannot be loaded in its process: {answer.get('error', answer)}")

    def _ask(self, message: Mapping[str, Any], limit_s: float, late: str) -> dict[str, Any]:
        """Send a line and read the next. Failures end the process; most raise `Unanswered`."""
        deadline, late, name = time.monotonic() + limit_s, f"{late} {limit_s:g} s", secrets.token_hex(8)
        data = json.dumps({**message, "call": name}, allow_nan=False).encode() + b"\n"
        while data:
            if not _ready(self._to_child, select.POLLOUT, deadline):
                self._end(late)
            try:
                data = data[os.write(self._to_child, data) :]
            except BrokenPipeError:
                self._end(f"{self.entry_point}: {self._how_it_ended()}")
        line = b""
        while not line.endswith(b"\n"):
            if not _ready(self._from_child, select.POLLIN, deadline):
                self._end(late)
            piece = os.read(self._from_child, 4096)
            if not piece:
                self._end(f"{self.entry_point}: {self._how_it_ended()}")
            line += piece
            if len(line) > MAX_ANSWER_BYTES:
                self._end(f"{self.entry_point}: its process wrote more than an answer can have")
        try:
            answer = read_json(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or answer.pop("call", None) != name:
            self.close()
            raise RewardError(f"{self.entry_point}: its process gave {line[:100]!r}, which does not answer this call")
        return answer

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "its process closed the pipe to the run"
        if code == -signal.SIGXCPU:
            return f"its process was ended after timeout_s {self._cpu_s} s of processor time"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def _end(self, reason: str) -> NoReturn:
        self.close()
        raise Unanswered(reason)


def _show(source: int, entry_point: str) -> None:
    """Print the first SHOWN_BYTES from a pipe and drain the rest."""
    left = SHOWN_BYTES
    with os.fdopen(source, "rb", buffering=0) as stream:
        while piece := stream.read(1 << 16):
            shown, left = piece[: max(0, left)], left - len(piece)
            if shown and left < 0:
                shown += f"\n{entry_point} has printed {SHOWN_BYTES} bytes; its process's further output is dropped\n".encode()
            with suppress(OSError):
                os.write(2, shown)


def _ready(descriptor: int, event: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
