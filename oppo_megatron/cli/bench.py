"""`oppo bench KIND`: measures the overlaps, decoding, or one GPU.  Scripts in `benchmarks/` use its functions for runs."""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oppo_megatron.cli.launch import launch, refuse_given_ranks
from oppo_megatron.cli.lengths import add_length_arguments, forced_lengths, length_settings
from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.parser import add_config_arguments, add_debug_argument, count, counts
from oppo_megatron.cli.signals import ending_by_signal
from oppo_megatron.config.derived import MODES
from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import usable_cores
from oppo_megatron.data.generated import write_random_prompts
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.shape import check_shape
from oppo_megatron.report.comparison import format_table

if TYPE_CHECKING:
    from oppo_megatron.bench.suite import Suite

OVERLAP = """Runs one configuration in every mode of the loop, with the same prompts and seed, and compares them.

modes: sequential (plain PPO), intra (scoring streamed during decoding), inter (B + delta rollouts decoded, the late
ones carried over), full (both), full+backfill (freed slots refilled at once), full+critic (the critic updated during
the next step's decoding), intra+critic, full+both.

placements: pair (as the configuration says), single (one process with all cores as threads), replicas (all roles on
every core: data-parallel processes of one thread).  pair has to beat sequential in single and replicas."""
DECODE = "Several engines, which take turns, decode the same prompts with the same random weights: tokens/s of each."
GPU = """Measures Qwen2.5 shapes with random weights in bfloat16 on one CUDA device: decoding against the memory bandwidth and
against transformers' generate, the share of scoring that a second stream hides, and PPO steps with and without the
overlaps and by TRL's trainer.  Everything is measured for the first size, for the others what fits into the time; every
figure is written at once.  No input files are needed."""
PEER_PYTHON = Path(".venv-trl/bin/python")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "docs/benchmarks.md explains the figures; benchmarks/README.md lists further studies."
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, summary, about, add, measure in (
        ("overlap", "plain PPO and every overlap, in one placement or several", OVERLAP, _overlap_arguments, _overlap),
        ("decode", "decode tokens/s of this engine, transformers and megatron-core", DECODE, _decode_arguments, _decode),
        ("gpu", "decoding, overlap and PPO steps on one GPU, unattended", GPU, _gpu_arguments, _gpu),
    ):
        raw = argparse.RawDescriptionHelpFormatter
        kind = kinds.add_parser(name, help=summary, description=about, formatter_class=raw)
        add_debug_argument(kind)
        add(kind)
        kind.set_defaults(measure=measure)


def run(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.suite import BenchStopped

    with ending_by_signal():
        try:
            return int(args.measure(args))
        except BenchStopped as stop:
            print(f"oppo bench: {stop}", file=sys.stderr)
            return 128 + signal.SIGTERM


def _overlap_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "overlap")
    add_resume_argument(parser)
    parser.add_argument("--modes", type=names, metavar="A,B", help="default: all")
    parser.add_argument(
        "--placements", type=names, default=["pair"], metavar="A,B", help="pair, single, replicas, or all; default pair"
    )
    parser.add_argument("--cores", type=count, metavar="N", help="cores of single and replicas; default: all that may be used")


def _overlap(args: argparse.Namespace) -> int:
    from oppo_megatron.bench import suite

    asked = chosen("--modes", args.modes, list(MODES))
    placements = chosen("--placements", args.placements, suite.PLACEMENTS)
    config = load_base(args)
    modes = [mode for mode in asked if mode in suite.known_modes(config)]
    if args.modes and "all" not in args.modes and modes != asked:
        hiding = ", ".join(mode for mode in asked if mode not in modes)
        raise ConfigError(
            f"--modes names {hiding}, which would hide the critic's update, but algorithm.preset {config.algorithm.preset} has "
            f"no critic; choose from {', '.join(suite.known_modes(config))}"
        )
    result = suite.bench_overlap(new_suite(args), config, modes, placements, args.cores or usable_cores())
    print(format_table(suite.COLUMNS, result["results"]))
    print("\nwhat each rank does, in percent of the time after the first step")
    ranks = [
        dict(zip(("placement", "mode"), name.split("/"), strict=True)) | rank
        for name, of_run in result["utilization"].items()
        for rank in of_run
    ]
    print(format_table(suite.RANK_COLUMNS, ranks))
    print("", *suite.work_lines(result), *suite.remarks(result, args.out), sep="\n")
    return 0


def _decode_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = {"hidden": 384, "layers": 8, "heads": 6, "kv-heads": 2, "ffn": 1024, "vocab": 8192}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=count, default=size, metavar="N", help=f"of the model; default {size}")
    parser.add_argument("--batch", type=counts, default=[1, 8, 16, 32], metavar="N,N", help="default 1,8,16,32")
    parser.add_argument("--prompt", type=count, default=64, metavar="N", help="prompt tokens; default 64")
    parser.add_argument("--new", type=count, default=32, metavar="N", help="timed steps, and the longest sequence; default 32")
    add_length_arguments(parser)
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="turns of each peer; default 5")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="CPU threads; default 1")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--peers", type=names, metavar="A,B", help="default: all; docs/benchmarks.md lists them")
    _add_out(parser, "decode")


def _decode(args: argparse.Namespace) -> int:
    from oppo_megatron.bench import decode

    possible = decode.available_peers()
    asked = args.peers or possible
    if unknown := [name for name in asked if name not in decode.PEERS]:
        raise ConfigError(f"--peers names {unknown}; the peers are {list(decode.PEERS)}")
    if missing := [name for name in asked if name not in possible]:
        raise ConfigError(f"--peers names {missing}, but this build of torch has no prepacked products; leave them out")
    shape: dict[str, Any] = {
        "model_type": "qwen2", "hidden_size": args.hidden, "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads, "intermediate_size": args.ffn,
        "vocab_size": args.vocab, "max_position_embeddings": args.prompt + args.new + 1, "tie_word_embeddings": False,
    }  # fmt: skip
    if problems := check_shape("bench decode", shape, ParallelConfig(), shape["max_position_embeddings"], None):
        raise ConfigError(problems)
    lengths = length_settings(args)
    work = decode.DecodeWork(shape, args.batch, args.prompt, args.new, args.repeats, args.threads, args.dtype, lengths)
    figures = decode.bench_decode(work, asked, args.out)
    parameters, processor = figures["parameters"] / 1e6, figures["machine"]["processor"]
    print(f"{parameters:.1f} M parameters, {args.threads} thread(s), {processor}")
    print(format_table(decode.COLUMNS, figures["results"]))
    print(f"figures: {args.out / 'decode.json'}, {args.out / 'decode.png'}")
    return 0


def _gpu_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=names, metavar="A,B", help="default: 0.5B,1.5B,3B")
    parser.add_argument("--batch", type=count, default=112, metavar="N", help="rollouts; default %(default)s")
    parser.add_argument("--limit", type=count, default=2048, metavar="N", help="response tokens; default %(default)s")
    parser.add_argument("--seconds", type=count, default=450, metavar="N", help="time for all; default %(default)s")
    script = Path("benchmarks/peers/compare.py")
    parser.add_argument("--trl", type=Path, default=script, metavar="FILE", help="the script that runs TRL; default %(default)s")
    parser.add_argument("--peer-python", type=Path, metavar="FILE", help=f"Python with TRL; default {PEER_PYTHON}, else this one")
    _add_out(parser, "gpu")


def _gpu(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.gpu import COLUMNS, SIZES, GpuBench, GpuWork, require_gpu

    sizes = chosen("--sizes", args.sizes, list(SIZES))
    memory_bytes = require_gpu()
    work = GpuWork(
        batch=args.batch,
        response_tokens=args.limit,
        steady_steps=max(1, min(GpuWork.steady_steps, args.limit // 2)),  # the others warm up
        delta=min(GpuWork.delta, args.batch),
    )
    python = args.peer_python or (PEER_PYTHON if PEER_PYTHON.is_file() else Path(sys.executable))
    bench = GpuBench(args.out, work, args.seconds, memory_bytes, (args.trl, python))
    figures = bench.run({size: SIZES[size] for size in sizes})
    print(format_table(COLUMNS, figures["results"]))
    print(f"figures: {args.out / 'gpu.json'}")
    return 0


def add_run_arguments(parser: argparse.ArgumentParser, kind: str, *, config: Literal["?"] | None = None) -> None:
    """Add CONFIG (optional if `config` is `?`) and the options of whole runs."""
    add_config_arguments(parser, nargs=config)
    parser.add_argument("--steps", type=count, metavar="N", help="PPO steps per run; default: the configuration's")
    parser.add_argument("--repeats", type=count, default=1, metavar="N", help="runs of each, in turn (A B C A B C); default 1")
    _add_out(parser, kind)
    parser.add_argument("--prompt-tokens", type=count, metavar="N", help="prompts of N random tokens instead of the data")
    parser.set_defaults(figures=f"{kind}.json", resume=None)
    add_length_arguments(parser)


def _add_out(parser: argparse.ArgumentParser, kind: str) -> None:
    out = Path("runs/bench") / kind
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="default %(default)s")


def add_resume_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", default=False, help="reuse the finished runs of an interrupted attempt in --out"
    )


def load_base(args: argparse.Namespace, inputs: str = "inputs") -> TrainConfig:
    """Random prompts go to `OUT/inputs`. Raises ConfigError."""
    refuse_given_ranks("`oppo bench` starts the ranks of each run itself; call it without torchrun or srun")
    refuse_figures(args.out / args.figures)
    from oppo_megatron.bench.suite import bare

    overrides = [*args.overrides, f"run_dir={args.out}", *forced_lengths(args)]
    if args.steps is not None:
        overrides.append(f"steps={args.steps}")
    if args.prompt_tokens is not None:
        tokenizer, prompts = write_random_prompts(args.out / inputs, args.prompt_tokens)
        overrides += [f"tokenizer.path={tokenizer}", f"data.path={prompts}"]
        overrides.append(f"data.max_prompt_tokens={args.prompt_tokens}")
    return bare(load_train(args.config, overrides))


def refuse_figures(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} holds an earlier benchmark, which is not overwritten; name another folder with --out")


def new_suite(args: argparse.Namespace) -> Suite:
    from oppo_megatron.bench.suite import Suite

    return Suite(args.out, args.repeats, functools.partial(launch, in_process=False), resume=args.resume)


def chosen(option: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return `names`, or all known ones for None or `all`. Raises ConfigError."""
    asked = [name for name in names or ["all"] if name != "all"]
    if unknown := [name or "''" for name in asked if name not in known]:
        raise ConfigError(f"{option} names {', '.join(unknown)}; choose from {', '.join(known)}, or all")
    return list(dict.fromkeys(known if "all" in (names or ["all"]) else asked))


def names(text: str) -> list[str]:
    return text.split(",")
