"""A rank killed, stopped or hanging at each stage of `oppo train`: all processes end in time, and the error names the rank.
`python -m tests.chaos.faults`; a killed rank needs stall_deadline_s 20, or its peer would be found standing still first."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.started import PLACES, struck
from tests.support.ppo import Workspace, deep

STALL_S, AFTER_S = {"killed": 20.0, "stopped": 4.0, "hangs": 4.0}, 20.0
NAMED = {"killed": "rank {} was ended by SIGKILL", "stopped": "rank {} did not answer", "hangs": "rank {} has not moved for"}


def run_case(workspace: Workspace, at: str, rank: int, how: str) -> str:
    heldout = {"path": str(workspace.root / "data" / "heldout.jsonl"), "max_prompt_tokens": 96, "max_rows": 3}
    changes: dict[str, Any] = {
        "steps": 6, "placement": {"mode": "disaggregated"}, "overlap.intra": True, "stall_deadline_s": STALL_S[how],
        "checkpoint": {"every_steps": 1, "asynchronous": at == "asynchronous"},
        "evaluation": {"data": heldout, "metrics": [{"kind": "verifier", "name": "arithmetic"}], "every_steps": 1},
    }  # fmt: skip
    told, seconds = struck(deep(workspace, f"{at}-{rank}-{how}", **changes), at, rank, how)
    assert NAMED[how].format(rank) in told, told
    other = next((line for line in told.replace("; rank", "\nrank").splitlines() if line.startswith(f"rank {1 - rank}")), "")
    assert other, f"nothing of rank {1 - rank}: {told}"
    limit_s = AFTER_S + (0.0 if how == "killed" else STALL_S[how])
    assert seconds <= limit_s, f"{seconds:.1f} s"
    return f"ended after {seconds:4.1f} s; {other[:110]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Every fault at every stage of a run.")
    parser.add_argument("--at", nargs="+", choices=list(PLACES), default=list(PLACES))
    parser.add_argument("--how", nargs="+", choices=list(NAMED), default=list(NAMED))
    parser.add_argument("--rank", nargs="+", type=int, choices=(0, 1), default=[0, 1])
    args, failed = parser.parse_args(), False
    with tempfile.TemporaryDirectory(prefix="oppo-faults-") as folder:
        workspace = Workspace.create(Path(folder))
        for at in args.at:
            for rank in [rank for rank in args.rank if at != "evaluation" or rank == 0]:  # the actor's
                for how in args.how:
                    try:
                        said = run_case(workspace, at, rank, how)
                    except AssertionError as error:
                        failed, said = True, f"FAILED: {error}"
                    print(f"{at}, rank {rank} {how}: {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
