"""`oppo bench`: measures decoding, and what the overlaps save, on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    _decode_arguments(kinds.add_parser("decode", help="decode tokens/s beside transformers and megatron-core"))


def run(args: argparse.Namespace) -> int:
    return int(args.measure(args))


def _decode_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = {"hidden": 384, "layers": 8, "heads": 6, "kv-heads": 2, "ffn": 1024, "vocab": 8192}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, metavar="N", help=f"of the model; default {size}")
    parser.add_argument("--batch", type=_integers, default=[1, 8, 32], metavar="N,N", help="default 1,8,32")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="prompt tokens; default 64")
    parser.add_argument("--new", type=int, default=32, metavar="N", help="timed decode steps; default 32")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="turns of each peer; default 5")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads; default 1")
    parser.add_argument("--peers", type=_names, metavar="A,B", help="default: all; see docs/performance.md")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures there, too")
    parser.set_defaults(measure=_decode)


def _decode(args: argparse.Namespace) -> int:
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.integrations.bench_decode import PEERS, DecodeWork, bench_decode
    from oppo_megatron.train.run_dir import write_json

    names = args.peers or list(PEERS)
    if unknown := [name for name in names if name not in PEERS]:
        raise ConfigError(f"--peers names {unknown}; the peers are {list(PEERS)}")
    work = DecodeWork(_shape(args), args.batch, args.prompt, args.new, args.repeats, args.threads)
    figures = bench_decode(work, names)
    columns = {
        "peer": "peer", "batch": "batch", "tokens/s": "tokens_per_s", "min": "min", "max": "max",
        "x hf": "over_hf", "x mcore-static": "over_mcore_static", "same tokens": "same_tokens",
    }  # fmt: skip
    print(
        f"{figures['parameters'] / 1e6:.1f} M parameters, {args.threads} thread(s), {figures['machine']['processor']}"
    )
    print(format_table(columns, figures["results"]))
    if args.out is not None:
        write_json(args.out, figures)
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


def format_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Aligned text: `columns` maps each heading to the key of its values."""
    cells = [list(columns), *([_cell(row[key]) for key in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
    return str(value)


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


_integers, _names = _list_of(int), _list_of(str)
