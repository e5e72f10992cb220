"""`oppo bench`: measures decoding, and what the overlaps save, on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    _decode_arguments(kinds.add_parser("decode", help="decode tokens/s beside transformers and megatron-core"))
    _overlap_arguments(kinds.add_parser("overlap", help="one PPO run: sequential, intra, inter and full"), "overlap")
    _overlap_arguments(kinds.add_parser("weave", help="colocated roles: sequential, unwoven and woven"), "weave")


def run(args: argparse.Namespace) -> int:
    return int(args.measure(args))


def _decode_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = {"hidden": 384, "layers": 8, "heads": 6, "kv-heads": 2, "ffn": 1024, "vocab": 8192}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=_count, default=size, metavar="N", help=f"of the model; default {size}")
    parser.add_argument("--batch", type=_counts, default=[1, 8, 32], metavar="N,N", help="default 1,8,32")
    parser.add_argument("--prompt", type=_count, default=64, metavar="N", help="prompt tokens; default 64")
    parser.add_argument("--new", type=_count, default=32, metavar="N", help="timed decode steps; default 32")
    parser.add_argument("--repeats", type=_count, default=5, metavar="N", help="turns of each peer; default 5")
    parser.add_argument("--threads", type=_count, default=1, metavar="N", help="CPU threads; default 1")
    parser.add_argument("--peers", type=_names, metavar="A,B", help="default: all; see docs/performance.md")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures there, too")
    parser.set_defaults(measure=_decode)


def _decode(args: argparse.Namespace) -> int:
    from oppo_megatron.config.model import ParallelConfig
    from oppo_megatron.config.shape import check_shape
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.integrations.bench_decode import PEERS, DecodeWork, bench_decode
    from oppo_megatron.train.run_dir import write_json

    names = args.peers or list(PEERS)
    if unknown := [name for name in names if name not in PEERS]:
        raise ConfigError(f"--peers names {unknown}; the peers are {list(PEERS)}")
    shape = _shape(args)
    if problems := check_shape("bench decode", shape, ParallelConfig(), shape["max_position_embeddings"], None):
        raise ConfigError(problems)
    work = DecodeWork(shape, args.batch, args.prompt, args.new, args.repeats, args.threads)
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


def _overlap_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace those of the file"
    )
    parser.add_argument("--modes", type=_names, metavar="A,B", help="default: all that are compared")
    parser.add_argument("--steps", type=_count, metavar="N", help="PPO steps a run; default: the configuration's")
    parser.add_argument("--repeats", type=_count, default=1, metavar="N", help="runs of each mode, in turn; default 1")
    parser.add_argument(
        "--prompt-tokens",
        type=_count,
        metavar="N",
        help="prompts of N random tokens, in place of the configuration's data",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench") / kind, metavar="DIR", help="default %(default)s"
    )
    parser.set_defaults(measure=_overlap if kind == "overlap" else _weave)


def _overlap(args: argparse.Namespace) -> int:
    from oppo_megatron.train.bench_overlap import MODES, compare
    from oppo_megatron.train.run_dir import write_json

    config = _overlap_config(args)
    runs = _run_modes(args, config, MODES, actions=False)
    result = compare(config, runs)
    write_json(args.out / "overlap.json", result)
    columns = {
        "mode": "mode", "s/step": "step_s", "decode s": "decode_s", "exposed s": "score_exposed_s",
        "scoring s": "score_busy_s", "hidden %": "hidden_percent", "train s": "train_s", "idle actor": "idle_actor_s",
        "idle scorer": "idle_scorer_s", "tokens/s": "tokens_per_s", "speed-up": "speedup_step_s",
        "total s": "total_s", "total speed-up": "speedup_total_s",
    }  # fmt: skip
    print(format_table(columns, result["results"]))
    print(f"figures: {args.out / 'overlap.json'}")
    return 0


def _weave(args: argparse.Namespace) -> int:
    from oppo_megatron.train.bench_overlap import WEAVES, compare
    from oppo_megatron.train.bench_weave import weave_figures
    from oppo_megatron.train.run_dir import write_json

    config = _overlap_config(args)
    runs = _run_modes(args, config, WEAVES, actions=True)
    result = compare(config, runs)
    for row in result["results"]:
        row |= weave_figures(runs[row["mode"]])
    write_json(args.out / "weave.json", result)
    columns = {
        "mode": "mode", "rounds s": "rounds_s", "bubble %": "bubble_percent", "s/step": "step_s",
        "tokens/s": "tokens_per_s", "speed-up": "speedup_step_s", "total s": "total_s", "bubble % by rank": "bubble_by_rank",
    }  # fmt: skip
    print(format_table(columns, result["results"]))
    print(f"figures: {args.out / 'weave.json'}")
    return 0


def _run_modes(
    args: argparse.Namespace, config: TrainConfig, known: Mapping[str, Mapping[str, Any]], *, actions: bool
) -> dict[str, list[Path]]:
    """Run each mode `--repeats` times, in turn.  The run directories by mode; raises RankError where a run fails."""
    from oppo_megatron.cli.launch import RankError, launch
    from oppo_megatron.cli.run import world_size
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.train.bench_overlap import mode_config
    from oppo_megatron.train.run_dir import RunDirectory

    modes: list[str] = args.modes or list(known)
    if unknown := [mode for mode in modes if mode not in known]:
        raise ConfigError(f"--modes names {unknown}; the modes are {list(known)}")
    runs = {mode: [args.out / f"{mode}-{turn}" for turn in range(1, args.repeats + 1)] for mode in modes}
    for run_dir in (path for paths in runs.values() for path in paths):
        RunDirectory(run_dir).require_unfinished()
    for turn in range(args.repeats):
        for mode in modes:
            print(f"--- {mode}, run {turn + 1} of {args.repeats}", flush=True)
            chosen = mode_config(config, known[mode], runs[mode][turn], actions=actions)
            if code := launch("train", chosen, world_size(config)):
                raise RankError(f"{mode}, run {turn + 1}, ended with exit code {code}; see above")
    return runs


def _overlap_config(args: argparse.Namespace) -> TrainConfig:
    """The checked configuration, its steps and prompts replaced as the options ask."""
    from oppo_megatron.cli.run import load_checked
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.data.random_prompts import write_random_prompts

    overrides = [*args.overrides, f"run_dir={args.out}"]
    if args.steps is not None:
        overrides.append(f"steps={args.steps}")
    if args.prompt_tokens is not None:
        tokenizer, prompts = write_random_prompts(args.out / "inputs", args.prompt_tokens)
        overrides += [f"tokenizer.path={tokenizer}", f"data.path={prompts}"]
        overrides.append(f"data.max_prompt_tokens={args.prompt_tokens}")
    config = load_checked("train", args.config, overrides)
    assert isinstance(config, TrainConfig)
    return config


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def format_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Aligned text: `columns` maps each heading to the key of its values."""
    cells = [list(columns), *([_cell(row[key]) for key in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(_cell(item) for item in value)
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
    return str(value)
