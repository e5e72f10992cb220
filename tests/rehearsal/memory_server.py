"""Measures layouts on request: a process with the stub and the libraries, which forks one per layout.
Reads JSON lines (fields of a `Layout`) and answers each with bytes by kind, or an error."""

from __future__ import annotations

from tests.rehearsal import cuda_stub

cuda_stub.load()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402


def main() -> None:
    from tests.rehearsal.alone import Alone
    from tests.rehearsal.peers import install

    peers = Alone()
    install(peers)
    import tests.rehearsal.holding  # noqa: F401  (layouts are forked with it)

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                answer: dict[str, Any] = {"taken": measured(asked, peers)}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        answers.write((told or '{"error": "the process died"}') + "\n")
        answers.flush()


def measured(asked: dict[str, Any], peers: Any) -> dict[str, float]:
    from tests.rehearsal.holding import Measurement
    from tests.rehearsal.memory_cases import Layout
    from tests.support.configs import run_of

    layout = Layout(**asked)
    config = run_of(layout.settings())
    return Measurement(config, layout.role, layout.rank(config), peers).run()


if __name__ == "__main__":
    main()
