"""Rule `code`: a response's last Python block passes the row's tests, each in its own process.

`grade` runs in an `IsolatedFunction` and starts `code_runner` per response; not a sandbox.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from oppo_megatron.errors import RewardError
from oppo_megatron.nesting import read_json
from oppo_megatron.rewards.isolation import MARK

ENTRY_POINT = f"{__name__}:grade"
TESTS = "tests"
"""The only field that `grade` reads: `Tests`."""

Tests = list[dict[str, str]]
"""Each `{"code": ...}`, run after the program, or `{"stdin": ..., "stdout": ...}`."""

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
RUNNER = Path(__file__).with_name("code_runner.py")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})\s*([\w+-]*)[^`]*")
_PYTHON = ("", "python", "python3", "py")
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", MARK)
_FORMS = "give a list of asserts, or of {input, output}"


def program_of(response: str) -> str | None:
    """The last closed fenced block in Python or no named language, or None."""
    found, fence, python, lines = None, "", False, list[str]()
    for line in response.splitlines():
        mark = _FENCE.fullmatch(line)
        if not fence and mark:
            fence, python, lines = mark[1], mark[2].lower() in _PYTHON, []
        elif fence and mark and not mark[2] and mark[1].startswith(fence):
            found, fence = "\n".join(lines) + "\n" if python else found, ""
        elif fence:
            lines.append(line)
    return found


def read_tests(value: Any) -> Tests:
    """Read asserts (text or list), a list of {input, output}, or {inputs, outputs}, also as JSON. Raises RewardError."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            value = read_json(value)
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        if name := value.get("fn_name"):
            raise RewardError(f"the tests call a function {name!r} by `fn_name`, which is not supported; {_FORMS}")
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise RewardError(f"the tests {str(value)[:100]!r} do not have as many `inputs` as `outputs`; {_FORMS}")
        value = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    if not isinstance(value, Sequence) or not value:
        raise RewardError(f"the tests {str(value)[:100]!r} are not tests; {_FORMS}")
    return [_test(each) for each in value]


def _test(each: Any) -> dict[str, str]:
    if isinstance(each, Mapping) and isinstance(each.get("input"), str) and isinstance(each.get("output"), str):
        return {"stdin": each["input"], "stdout": each["output"]}
    if isinstance(each, str) and each.strip():
        try:
            compile(each, "tests", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the latter two: nested too deeply
            raise RewardError(f"the test {each[:100]!r} is not Python ({error}); {_FORMS}") from error
        return {"code": each}
    raise RewardError(f"the test {str(each)[:100]!r} is neither code nor {{input, output}}; {_FORMS}")


def grade(prompt: str, response: str, fields: Mapping[str, Any], wall_s: float, memory_mb: int, partial_credit: bool) -> float:
    """Share of tests passed within `wall_s` in all; without partial credit 1.0 for all, else 0.0."""
    tests, program, passed = fields[TESTS], program_of(response), 0
    if program is None:
        return 0.0
    given = [{name: text for name, text in test.items() if name != "stdout"} for test in tests]  # not what is wanted
    job = {"program": program, "tests": given, "memory_bytes": memory_mb << 20, "cpu_s": math.ceil(wall_s) + 1}
    with _running(job, wall_s) as verdicts:
        for test, verdict in zip(tests, verdicts, strict=False):
            fine = verdict.get("passed", False)
            if "code" not in test and (output := verdict.get("stdout")) is not None:
                fine = _stripped(output) == _stripped(test["stdout"])
            passed += fine
            if not (fine or partial_credit):
                break
    return passed / len(tests) if partial_credit else float(passed == len(tests))


def about_network() -> str:
    probe = subprocess.run(  # noqa: S603  (this package's own file, and no shell)
        [sys.executable, "-I", RUNNER], input=b'{"tests": []}', stdout=subprocess.PIPE, check=True
    )
    if read_json(probe.stdout)["network"] == "cut":
        return "the programs reach no network"
    return "the programs can reach the network: this kernel or machine has no filter for it; take a host that you can lose"


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@contextmanager
def _running(job: Mapping[str, Any], wall_s: float) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield verdicts for up to `wall_s`, then end every process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # whoever leaves its family becomes a child of this process
    deadline = time.monotonic() + wall_s
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as told:
        told.write(json.dumps(job).encode())
        told.seek(0)
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | {"HOME": folder, "TMPDIR": folder}
        runner = subprocess.Popen(  # noqa: S603  (this package's own file, and no shell)
            [sys.executable, "-I", RUNNER],
            stdin=told,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        assert runner.stdout is not None
        try:
            yield _verdicts(runner.stdout.fileno(), deadline)
        finally:
            while children := psutil.Process().children(recursive=True):  # they may start others meanwhile
                for child in children:
                    with suppress(psutil.NoSuchProcess):
                        child.send_signal(signal.SIGKILL)
                psutil.wait_procs(children, timeout=1.0)
            runner.wait()
            runner.stdout.close()


def _verdicts(descriptor: int, deadline: float) -> Iterator[dict[str, Any]]:
    poll, data, first = select.poll(), b"", True
    poll.register(descriptor, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return
        *lines, data = (data + piece).split(b"\n")
        for line in lines:
            if not first:
                yield read_json(line)
            first = False
