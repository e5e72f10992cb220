"""`oppo bench decode`: decode tokens/s beside other engines, on the same weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from oppo_megatron.cli.bench.common import (
    add_length_arguments,
    add_limit_argument,
    count,
    counts,
    names,
)
from oppo_megatron.cli.lengths import length_settings

HELP = "decode tokens/s beside transformers and megatron-core"
ABOUT = """Several engines, which take turns, decode the same prompts with the same random weights: tokens/s of each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = {"hidden": 384, "layers": 8, "heads": 6, "kv-heads": 2, "ffn": 1024, "vocab": 8192}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=count, default=size, metavar="N", help=f"of the model; default {size}")
    parser.add_argument("--batch", type=counts, default=[1, 8, 16, 32], metavar="N,N", help="default 1,8,16,32")
    parser.add_argument("--prompt", type=count, default=64, metavar="N", help="prompt tokens; default 64")
    parser.add_argument(
        "--new", type=count, default=32, metavar="N", help="timed decode steps, and the longest sequence; default 32"
    )
    add_length_arguments(parser)
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="turns of each peer; default 5")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="CPU threads; default 1")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--peers", type=names, metavar="A,B", help="default: all; see docs/measurements/xeon-amx.md")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/decode"), metavar="DIR", help="default %(default)s"
    )
    add_limit_argument(parser)
    parser.set_defaults(measure=_decode)


def _decode(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.decode import COLUMNS, LIMIT_COLUMNS, PEERS, DecodeWork, available_peers, bench_decode
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.limit import peak_lines
    from oppo_megatron.config.model import ParallelConfig
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.layout.shape import check_shape

    possible = available_peers()
    chosen = args.peers or possible
    if unknown := [name for name in chosen if name not in PEERS]:
        raise ConfigError(f"--peers names {unknown}; the peers are {list(PEERS)}")
    if missing := [name for name in chosen if name not in possible]:
        raise ConfigError(f"--peers names {missing}, but this build of torch has no prepacked products; leave them out")
    shape = _shape(args)
    if problems := check_shape("bench decode", shape, ParallelConfig(), shape["max_position_embeddings"], None):
        raise ConfigError(problems)
    work = DecodeWork(
        shape, args.batch, args.prompt, args.new, args.repeats, args.threads, args.dtype, length_settings(args)
    )
    figures = bench_decode(work, chosen, args.out, limit=args.limit)
    print(
        f"{figures['parameters'] / 1e6:.1f} M parameters, {args.threads} thread(s), {figures['machine']['processor']}"
    )
    print(format_table(COLUMNS | (LIMIT_COLUMNS if args.limit else {}), figures["results"]))
    if args.limit:
        print(*peak_lines(figures["peaks"]), sep="\n")
    print(f"figures: {args.out / 'decode.json'}, {args.out / 'decode.png'}")
    return 0


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "intermediate_size": args.ffn,
        "vocab_size": args.vocab,
        "max_position_embeddings": args.prompt + args.new + 1,
        "tie_word_embeddings": False,
    }
