"""A server of this folder, in a process of its own, which answers a line of JSON for each that it is asked:
`python -m tests.rehearsal.asking MODULE PEERS` answers by `MODULE.answering(PEERS())`, with the stub and the libraries loaded."""

import importlib
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.rehearsal import cuda_stub
from tests.support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]


class Server:
    def __init__(self, module: str, peers: str) -> None:
        environment = os.environ | {"PYTHONPATH": python_path(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.asking", module, peers],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        self._kept: dict[str, Any] = {}

    def answer(self, asked: dict[str, Any]) -> Any:
        line = json.dumps(asked)
        if line not in self._kept:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            self._kept[line] = json.loads(self._process.stdout.readline())
        return self._kept[line]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def forked(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all at once, each in a process of its own; return each result, or {"error": why there is none}."""
    children = []
    for work in works:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                told = pickle.dumps(work())
            except BaseException:
                told = pickle.dumps({"error": traceback.format_exc()})
            with os.fdopen(write, "wb") as pipe:
                pipe.write(told)
            os._exit(0)
        os.close(write)
        children.append((child, read))
    found = []
    for child, read in children:
        with os.fdopen(read, "rb") as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        found.append(pickle.loads(told) if told else {"error": "the process died"})
    return found


def main(module: str, kind: str) -> None:
    cuda_stub.load()
    peers = importlib.import_module("tests.rehearsal.peers")
    mine = getattr(peers, kind)()
    peers.install(mine)  # before anything of the product is imported
    answer = importlib.import_module(f"tests.rehearsal.{module}").answering(mine)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
