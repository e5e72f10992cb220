"""Rehearses cases on request: a process with the stub and the libraries, which forks the ranks of each case.
Reads JSON lines (a case, {"config": FILE} of `oppo train`, {"order": FILE} of `oppo bench gpu`); answers with ranks' reports."""

from __future__ import annotations

from tests.rehearsal import cuda_stub

cuda_stub.load()

import json  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections import Counter  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch._dynamo  # noqa: E402, F401  (fake tensors ask for it)
import torch.distributed as dist  # noqa: E402

Shapes = dict[Any, Any]


def main() -> None:
    from tests.rehearsal.peers import Peers, install

    peers = Peers()
    install(peers)
    import oppo_megatron.train.entry
    import oppo_megatron.train.supervised  # noqa: F401  (ranks are forked with both)
    from oppo_megatron.config.describe import SUPERVISED
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.engine import device_decode
    from tests.rehearsal import defects, rank
    from tests.rehearsal.cases import PLAIN, PREFERENCES, SYNC_STEPS
    from tests.support.configs import run_of
    from tests.support.ppo import Workspace

    device_decode.SYNC_STEPS |= dict.fromkeys(device_decode.SYNC_STEPS, SYNC_STEPS)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kept: Shapes = {}
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace.create(Path(folder))
        for number, line in enumerate(sys.stdin):
            asked = json.loads(line)
            plant = defects.DEFECTS[asked["defect"]].plant if asked.get("defect") else None
            if "order" in asked:
                work = partial(rank.bench_part, Path(asked["order"]))
            elif "config" in asked:
                work = partial(rank.train, load_config(TrainConfig, asked["config"]))
            elif asked["kind"] == "train":
                settings = workspace.config(f"{number}", **{**PLAIN, **asked["changes"]})
                work = partial(rank.train, run_of(settings))
            else:
                settings = workspace.files(f"{number}", "pairs") | PREFERENCES | asked["changes"]
                work = partial(rank.train_supervised, SUPERVISED[asked["kind"]](**settings))
            reports = _on_ranks(asked.get("ranks", 1), Path(folder), peers, kept, work, plant)
            for report in reports:
                kept |= report.pop("shapes", {})
            _add_lost_messages(reports)
            answers.write(json.dumps(reports) + "\n")
            answers.flush()


def _on_ranks(size: int, folder: Path, peers: Any, kept: Shapes, work: Any, plant: Any) -> list[dict[str, Any]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _be(rank, size, store.port, folder, peers, kept, work, plant)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    found = [folder / f"report-{rank}" for rank in range(size)]
    reports = [pickle.loads(each.read_bytes()) if each.exists() else {"error": "the rank died"} for each in found]
    for each in found:
        each.unlink(missing_ok=True)
    return reports


def _add_lost_messages(reports: list[dict[str, Any]]) -> None:
    """A message that nobody takes keeps a stream for ever, and what comes behind it."""
    left: Counter[str] = Counter()
    for report in reports:
        left.update(report.pop("messages", {}))
    lost = {f"messages that were sent and not taken, or the reverse, over {key}": n for key, n in left.items() if n}
    for report in reports:
        if report["error"] is None:
            report["faults"] |= lost


def _be(rank: int, size: int, port: int, folder: Path, peers: Any, kept: Shapes, work: Any, plant: Any) -> None:
    from tests.rehearsal.rank import rehearse

    code = 1
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        report = rehearse(rank, size, store, peers, kept, work, plant)
        (folder / f"report-{rank}").write_bytes(pickle.dumps(report))
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
