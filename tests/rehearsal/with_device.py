"""Runs a module or a script as python does, on a CUDA device that is fake; what it starts by `sys.executable` runs so, too.

    python -m tests.rehearsal.with_device PYTHON -m oppo_megatron bench gpu ...

PYTHON is a program that does this with its arguments (`cuda_stub.write_python`).  At the end what was wrong is told, a line each,
behind `FAULT`.
"""

from __future__ import annotations

from tests.rehearsal import cuda_stub

cuda_stub.load()

import runpy  # noqa: E402
import sys  # noqa: E402
from datetime import timedelta  # noqa: E402
from typing import Any  # noqa: E402

import torch._dynamo  # noqa: E402, F401
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from tests.rehearsal import device  # noqa: E402
from tests.rehearsal.peers import Peers, install  # noqa: E402
from tests.rehearsal.watch import Watch  # noqa: E402


def main(python: str, *arguments: str) -> None:
    sys.executable = python
    watch, peers = Watch({}), Peers()
    install(peers)
    device.install(watch)
    peers.join(watch, dist.HashStore(), 0, 1)
    begin = dist.init_process_group

    def alone(*_: Any, **__: Any) -> None:
        begin("fake", store=FakeStore(), rank=0, world_size=1)

    dist.init_process_group = alone
    from oppo_megatron.cluster import process_groups

    process_groups.world_timeout = lambda: timedelta(seconds=60)
    try:
        with watch:
            if arguments[0] == "-m":
                sys.argv = list(arguments[1:])
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(arguments)
                runpy.run_path(arguments[0], run_name="__main__")
    finally:
        watch.end()
        for fault in watch.faults:
            print(cuda_stub.FAULT, fault, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
