"""`oppo convert`: rewrite Hugging Face, Megatron or NeMo-Aligner weights, optionally with another dtype or head."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from oppo_megatron.cli.parser import at_least, count
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.tokenizer import load_tokenizer, special_ids, write_tokenizer
from oppo_megatron.errors import ConfigError
from oppo_megatron.modeldir.megatron import find_megatron
from oppo_megatron.modeldir.vocabularies import GENERATION_CONFIG, model_eos_ids
from oppo_megatron.nesting import read_json
from oppo_megatron.policy.finding import CHECKPOINTS, RUN_CONFIG, TOKENIZER_FILES, WEIGHTS, run_of
from oppo_megatron.processes import signals_held


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", type=Path, metavar="SRC", help="Hugging Face directory, or Megatron torch_dist checkpoint")
    parser.add_argument("dst", type=Path, metavar="DST", help="directory to write; must be empty or not exist")
    parser.add_argument(
        "--to", choices=["hf", "megatron", "nemo"], default="hf",
        help="format of DST: Hugging Face safetensors, Megatron torch_dist, or the latter as NeMo-Aligner names and places it "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="config.json of a SRC in Megatron's format that has none")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="peft directory of LoRA adapters of SRC, merged into DST")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="default: the adapters', SRC's or its run's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the narrowest that keeps all bits")
    parser.add_argument(
        "--as", dest="target", choices=["causal-lm", "reward"], default="causal-lm",
        help="what DST is: *ForCausalLM, or *ForSequenceClassification with one label (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--fresh-head-seed", type=at_least(0), metavar="N", help="--as reward: give a causal LM a new scalar head drawn from N"
    )
    parser.add_argument(
        "--max-shard-mb", type=count, default=2048, metavar="N", help="--to hf: largest file, in MiB (default: %(default)s)"
    )
    parser.add_argument(
        "--check", action="store_true",
        help="compare SRC and DST: outputs in transformers; all tensors if one is of Megatron or adapters are merged",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Raises CheckpointError if SRC cannot be converted to the requested format or DST is not empty."""
    with signals_held():
        from oppo_megatron.integrations.huggingface import Conversion, compare_outputs, compare_weights, convert

    if (args.src / RUN_CONFIG).is_file() and not (args.src / "config.json").is_file():
        weights = args.src / WEIGHTS
        found = [weights] if (weights / "config.json").is_file() else [path.parent for path in weights.glob("*/config.json")]
        named = " or ".join(map(str, sorted(found))) or f"models of one of its checkpoints (in {args.src / CHECKPOINTS})"
        raise ConfigError(f"{args.src} is a run, not weights; name {named}")
    head: Literal["lm", "scalar"] = "scalar" if args.target == "reward" else "lm"
    megatron = args.src.is_dir() and find_megatron(args.src, args.config) is not None
    if args.config is not None and args.src.exists() and not megatron:
        raise ConfigError(f"--config says the shape of a Megatron checkpoint, which {args.src} is not; drop it")
    what = Conversion(head, args.to, args.dtype, args.fresh_head_seed, args.max_shard_mb << 20, args.config, args.adapter)
    with tempfile.TemporaryDirectory() as folder:
        num_tensors = convert(args.src, args.dst, what, partial(_side_files, args, Path(folder)))
    print(f"wrote {args.dst}: {num_tensors} tensors as {args.target}")
    if args.check and args.to == "hf" and not megatron and args.adapter is None:
        of, difference = compare_outputs(args.src, args.dst, what.head, args.fresh_head_seed is not None)
        print(f"largest difference of {of} between {args.src} and {args.dst} in transformers: {difference:.3g}")
    elif args.check:
        num_tensors, difference = compare_weights(args.src, args.dst, what)
        src = f"{args.src} with the adapters of {args.adapter}" if args.adapter is not None else args.src
        print(f"largest difference of {num_tensors} tensors between {src} and {args.dst}, read back: {difference:.3g}")
    return 0


def _side_files(
    args: argparse.Namespace, folder: Path, family: str, found: Sequence[Path]
) -> tuple[Sequence[Path], Mapping[str, Any]]:
    """Tokenizer and generation settings for DST: SRC's, or completed in `folder`."""
    scored = args.target == "reward"
    path, template = (args.tokenizer, None) if args.tokenizer is not None else _tokenizer_of(args.src, args.adapter)
    whole = any(file.name == "tokenizer.json" for file in found) and _names_special_tokens(args.src, scored=scored)
    if path is None or (path == args.src and whole):
        if path is None:
            print(f"{args.src} has no tokenizer, and {args.dst} gets none; name one with --tokenizer", file=sys.stderr)
        return found, {}
    tokenizer = load_tokenizer(TokenizerConfig(path=path, chat_template=template), args.src)
    ids = special_ids(tokenizer, scored=scored)
    has_config = args.adapter is not None and (args.adapter / GENERATION_CONFIG).is_file()
    source = args.adapter if has_config else args.src
    if changed := write_tokenizer(folder, tokenizer, ids, family, scored=scored, source=source):
        print(changed, file=sys.stderr)
    return sorted(folder.iterdir()), ids


def _tokenizer_of(src: Path, adapter: Path | None) -> tuple[Path | None, str | None]:
    """The tokenizer next to adapters or weights, else tokenizer and chat template of their run."""
    for directory in (adapter, src):
        if directory is not None and any((directory / name).is_file() for name in TOKENIZER_FILES):
            return directory, None
    run = run_of(src)
    return (None, None) if run is None else (run.tokenizer.path, run.tokenizer.chat_template)


def _names_special_tokens(src: Path, *, scored: bool) -> bool:
    """True if it names a token that ends responses, or its tokenizer has none; `scored`: a padding token that ends none."""
    path, name = src / ("config.json" if scored else "tokenizer_config.json"), "pad_token_id" if scored else "eos_token"
    token, ends = read_json(path.read_bytes()).get(name) if path.is_file() else None, model_eos_ids(src)
    return (token is not None and token not in ends) if scored else (bool(ends) or not token)
