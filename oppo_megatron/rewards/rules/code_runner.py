"""Runs a program against tests, each in a copy of this process: python -I code_runner.py, with a job on standard input.

    job       {"program": text, "tests": [{"code": text} | {"stdin": text}], "memory_bytes": n, "cpu_s": n}
    answer    {"network": "cut" | "open"}, then a line for each test in turn: {"passed": bool} | {"stdout": text | null}

It imports nothing of the package, so that the program finds nothing of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import secrets
import signal
import struct
import sys
import tempfile
import threading
from typing import Any

MAX_OUTPUT_BYTES = 1 << 20
FILE_BYTES = 16 << 20
NONCE_BYTES = 16
VERDICT = 3
"""Descriptor to which a copy writes that it reached the end of a test of code."""
MAX_DESCRIPTORS = 1 << 16

# linux/audit.h, and system call numbers of socket and io_uring_setup per machine
MACHINES = {"x86_64": (0xC000003E, 41, 425), "aarch64": (0xC00000B7, 198, 425)}
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2
BPF_LOAD, BPF_JUMP_IF_EQUAL, BPF_JUMP_IF_GREATER_OR_EQUAL, BPF_RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
X32_BIT = 0x40000000


def main() -> None:
    _end_with_parent()
    job = json.loads(sys.stdin.buffer.read())
    answers = os.dup(1)
    _tell(answers, {"network": "cut" if cut_network() else "open"})
    for test in job["tests"]:
        _tell(answers, _run(job, test))


def _end_with_parent() -> None:
    """Otherwise nothing would end an endless program after the run is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _tell(answers: int, line: dict[str, Any]) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]


def _run(job: dict[str, Any], test: dict[str, str]) -> dict[str, Any]:
    nonce = secrets.token_bytes(NONCE_BYTES)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
        given.write(test.get("stdin", "").encode())
        given.seek(0)
        child = os.fork()
        if child == 0:
            _be_tested(job, test, given.fileno(), output.fileno(), nonce)
        status = os.waitpid(child, 0)[1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        output.seek(0)
        said = output.read(MAX_OUTPUT_BYTES + 1)
    if "code" in test:
        return {"passed": said == nonce}
    fine = status == 0 and len(said) <= MAX_OUTPUT_BYTES
    return {"stdout": said.decode("utf-8", "replace") if fine else None}


def _be_tested(job: dict[str, Any], test: dict[str, str], given: int, output: int, nonce: bytes) -> None:
    """Never returns. `nonce` proves, unlike an exit code, that a test's end was reached."""
    failed = 1
    try:
        os.setpgid(0, 0)
        _end_with_parent()
        nowhere, spoken = os.open(os.devnull, os.O_RDWR), "stdin" in test
        for descriptor, file in enumerate((given, output if spoken else nowhere, nowhere, output)):
            os.dup2(file, descriptor)
        os.closerange(VERDICT + (not spoken), MAX_DESCRIPTORS)
        _limit(job)
        names = {"__name__": "__main__" if spoken else "solution"}
        _execute(job["program"], names)
        if not spoken:
            _execute(test["code"], names)
            os.write(VERDICT, nonce)
        failed = 0
    except SystemExit as leaving:
        failed = int(leaving.code not in (None, 0))
    except BaseException:  # noqa: S110  (whatever it raises is a failed test)
        pass
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
    except BaseException:
        failed = 1
    os._exit(failed)


def _execute(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "solution.py", "exec"), names)  # noqa: S102  (what this process is for)


def _limit(job: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_CPU: job["cpu_s"],
    }
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def cut_network() -> bool:
    """Forbid sockets to this process and its descendants; False if unsupported."""
    if platform.machine() not in MACHINES:
        return False
    audit, socket, io_uring_setup = MACHINES[platform.machine()]
    steps = [  # (operation, where true, where false, number): jumps are counted from the next step
        (BPF_LOAD, 0, 0, 4),
        (BPF_JUMP_IF_EQUAL, 0, 5, audit),
        (BPF_LOAD, 0, 0, 0),
        (BPF_JUMP_IF_GREATER_OR_EQUAL, 3, 0, X32_BIT),
        (BPF_JUMP_IF_EQUAL, 2, 0, socket),
        (BPF_JUMP_IF_EQUAL, 1, 0, io_uring_setup),
        (BPF_RETURN, 0, 0, ALLOW),
        (BPF_RETURN, 0, 0, REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) == 0


if __name__ == "__main__":
    main()
