"""How many carried tokens survive new weights, by learning rate and response length (`overlap.carry: redraw`).

    python -m benchmarks.redraw CONFIG.yaml [a.b=c ...] --rates 1e-6,1e-5,1e-4 --tokens 30,300,1000

Each run makes `--steps` steps from the configuration's policy, with as many carried prompts as a batch has.  `kept`: share of
carried tokens that the next policy draws again, by step (median, lowest).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from oppo_megatron.rundir.metrics_log import read_metrics


def kept(config: str, overrides: list[str], out: Path) -> list[float]:
    command = [sys.executable, "-m", "oppo_megatron", "train", config, f"run_dir={out}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [line["tokens_kept"] for line in read_metrics(out / "metrics.jsonl") if "tokens_kept" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--rates", default="1e-7,1e-6,1e-5,1e-4", help="learning rates of the actor")
    parser.add_argument("--tokens", default="30,100,300,1000", help="most tokens of a response")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    print("| learning rate | most tokens | kept, median | lowest |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="oppo-redraw-") as folder:
        for tokens in args.tokens.split(","):
            for rate in args.rates.split(","):
                fixed = [
                    f"steps={args.steps}", f"actor.optimizer.lr={rate}", f"rollout.max_response_tokens={tokens}",
                    "overlap.inter=true", "overlap.carry=redraw", "overlap.delta.rule=fixed", "logging.console=off",
                    "checkpoint.final=nothing", "checkpoint.every_minutes=0",
                ]  # fmt: skip
                shares = kept(args.config, [*args.overrides, *fixed], Path(folder) / f"{rate}-{tokens}")
                print(f"| {rate} | {tokens} | {median(shares):.1%} | {min(shares):.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
