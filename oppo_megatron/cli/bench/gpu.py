"""`oppo bench gpu`: decoding, scoring beside it and PPO steps on one GPU, within a time."""

from __future__ import annotations

import argparse
from pathlib import Path

from oppo_megatron.cli.bench.common import chosen, count, names

HELP = "one GPU, unattended: decoding against its bandwidth and transformers, scoring on a second stream, PPO steps"
ABOUT = """Measures Qwen2.5 shapes with random weights in bfloat16 on one CUDA device: decode tokens/s against what reading
weights and caches allows and beside transformers' generate, how much of the scoring a second stream hides, and PPO steps with and
without the overlaps and by TRL's trainer.  Of the first size all is measured, of the others what there is time for; every figure
is written at once.  It needs no input files."""

PEER_PYTHON = Path(".venv-trl/bin/python")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=names, metavar="A,B", help="default: 0.5B,1.5B,3B")
    parser.add_argument("--batch", type=count, default=112, metavar="N", help="rollouts; default %(default)s")
    parser.add_argument("--limit", type=count, default=2048, metavar="N", help="response tokens; default %(default)s")
    parser.add_argument("--seconds", type=count, default=450, metavar="N", help="time for all; default %(default)s")
    parser.add_argument(
        "--trl",
        type=Path,
        default=Path("benchmarks/peers/compare.py"),
        metavar="FILE",
        help="the script that runs TRL; default %(default)s",
    )
    parser.add_argument(
        "--peer-python",
        type=Path,
        metavar="FILE",
        help="the Python that has TRL; default .venv-trl/bin/python, or else this one",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench/gpu"), metavar="DIR", help="default %(default)s")
    parser.set_defaults(measure=_gpu)


def _gpu(args: argparse.Namespace) -> int:
    import sys

    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.gpu import COLUMNS, SIZES, GpuBench, GpuWork, require_gpu

    sizes = chosen("--sizes", args.sizes, list(SIZES))
    memory_bytes = require_gpu()
    work = GpuWork(
        batch=args.batch,
        response_tokens=args.limit,
        steady_steps=max(1, min(GpuWork.steady_steps, args.limit // 2)),  # beside those that warm up
        delta=min(GpuWork.delta, args.batch),
    )
    python = args.peer_python or (PEER_PYTHON if PEER_PYTHON.is_file() else Path(sys.executable))
    figures = GpuBench(args.out, work, args.seconds, memory_bytes, (args.trl, python)).run(
        {size: SIZES[size] for size in sizes}
    )
    print(format_table(COLUMNS, figures["results"]))
    print(f"figures: {args.out / 'gpu.json'}")
    return 0
