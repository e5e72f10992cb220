"""SIGTERM at random moments of `oppo train`: saved within the deadline every time, resumed exactly.

    python -m tests.chaos.preemptions [--moments 20] [--seed 7] [--layouts ...]

One run for each layout is told to stop again and again, and resumed, until it ends; then its rollouts, its metrics (but for
times) and the weights must be those of a run that was left alone, to the bit.  Prints a line a stop, and the seed.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oppo_megatron.errors import EXIT_REQUEUE
from tests.e2e.started import rank_pids, start, still_there, wait_until
from tests.e2e.test_resume import CARRIED, assert_bit_equal, checkpoints
from tests.support.layouts import deep
from tests.support.ppo import Workspace, read_outcome

DEADLINE_S = 20.0
STEPS_A_STOP = 9  # of the whole run; a stop comes within the first three steps or so after a start
LAYOUTS: dict[str, tuple[float, dict[str, Any]]] = {
    "actor | scorers": (0.6, {"mode": "disaggregated"}),
    "two replicas": (0.2, {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}}),
    "tensor parallel": (0.2, {"mode": "colocated", "actor": {"tp": 2}, "scorer": {"tp": 2}}),
}
"""Share of the moments, and placement."""


def preempt(name: str, moments: int, draw: random.Random, workspace: Workspace) -> None:
    """Stop a run of this layout so many times, and compare.  Raises AssertionError."""
    steps = STEPS_A_STOP * moments + 2
    changes = CARRIED | {"steps": steps, "placement": LAYOUTS[name][1], "preempt_deadline_s": DEADLINE_S}
    label = "".join(c for c in name if c.isalpha())
    plain = deep(workspace, f"{label}-plain", **changes)
    finish(plain)
    step_s = sum(line["step_s"] for line in read_outcome(Path(plain["run_dir"])).metrics) / steps
    config = deep(workspace, label, **changes)
    for number, seconds in enumerate(stops(config, moments, step_s, draw), start=1):
        print(f"{name}: stop {number}, {checkpoints(config)[-1]}, saved and ended after {seconds:.2f} s", flush=True)
    finish(config, "--resume")
    assert_bit_equal(read_outcome(Path(config["run_dir"])), read_outcome(Path(plain["run_dir"])))
    print(f"{name}: the same rollouts, metrics and weights to the bit as the run that was left alone", flush=True)


def stops(config: dict[str, Any], moments: int, step_s: float, draw: random.Random) -> Iterator[float]:
    """Seconds from each signal to the end of the run."""
    hosts = Path(config["run_dir"]) / "hosts.json"
    for _ in range(moments):
        before = hosts.stat().st_mtime_ns if hosts.exists() else 0
        run = start(config, "--resume")
        wait_until(run, lambda before=before: hosts.exists() and hosts.stat().st_mtime_ns > before)
        time.sleep(draw.uniform(0, 1.0 + 3 * step_s))  # the models are built meanwhile
        pids = rank_pids(config)
        told = time.monotonic()
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=DEADLINE_S + 20)
        seconds = time.monotonic() - told
        assert run.returncode == EXIT_REQUEUE and "nothing was saved" not in said, said
        assert seconds <= DEADLINE_S and not still_there(pids)
        yield seconds


def finish(config: dict[str, Any], *options: str) -> None:
    run = start(config, *options)
    _, said = run.communicate(timeout=600)
    assert run.returncode == 0, said


def main() -> int:
    parser = argparse.ArgumentParser(description="SIGTERM at random moments; exact resume.")
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.moments} moments, preempt_deadline_s {DEADLINE_S:g}", flush=True)
    with tempfile.TemporaryDirectory(prefix="oppo-preemptions-") as folder:
        workspace = Workspace.create(Path(folder))
        for name in args.layouts:
            draw = random.Random(f"{args.seed} {name}")
            preempt(name, max(1, round(LAYOUTS[name][0] * args.moments)), draw, workspace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
