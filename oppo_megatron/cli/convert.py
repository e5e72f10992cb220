"""`oppo convert`: a Hugging Face directory rewritten with another dtype, head or shard size."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", type=Path, metavar="SRC", help="Hugging Face directory (config.json + safetensors)")
    parser.add_argument("dst", type=Path, metavar="DST", help="directory to write; must be empty or not exist")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: the narrowest that keeps every bit of SRC"
    )
    parser.add_argument(
        "--as",
        dest="target",
        choices=["causal-lm", "reward"],
        default="causal-lm",
        help="what DST is: *ForCausalLM, or *ForSequenceClassification with one label (default: %(default)s)",
    )
    parser.add_argument(
        "--fresh-head-seed", type=int, metavar="N", help="--as reward: give a causal LM a new scalar head drawn from N"
    )
    parser.add_argument(
        "--max-shard-mb",
        type=_positive_int,
        default=2048,
        metavar="N",
        help="largest file, in MiB (default: %(default)s)",
    )
    parser.add_argument("--check", action="store_true", help="compare both directories' outputs in transformers")


def run(args: argparse.Namespace) -> int:
    """Raises CheckpointError if SRC cannot be read as what DST is to be, or DST is not empty."""
    import torch

    from oppo_megatron.config.model import ModelConfig
    from oppo_megatron.errors import CheckpointError, ConfigError
    from oppo_megatron.runtime.mcore.hf_layout import Head
    from oppo_megatron.runtime.mcore.hf_source import FreshHead, open_weights, side_files
    from oppo_megatron.runtime.mcore.hf_weights import rewrite_weights

    head: Head = "scalar" if args.target == "reward" else "lm"
    fresh = args.fresh_head_seed is not None
    if fresh and head == "lm":
        raise ConfigError(
            "--fresh-head-seed draws a scalar head, which a causal-lm lacks. Add --as reward or drop the flag."
        )
    model = ModelConfig(checkpoint=args.src, fresh_head=fresh, init_seed=args.fresh_head_seed or 0)
    shape, source = open_weights(model, head)
    if fresh and not isinstance(source, FreshHead):
        raise CheckpointError(f"{args.src} has a scalar head already, which is kept. Drop --fresh-head-seed.")
    rewrite_weights(
        shape,
        source,
        args.dst,
        head=head,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        max_shard_bytes=args.max_shard_mb << 20,
        extra_files=side_files(args.src),
    )
    print(f"wrote {args.dst}: {len(source.names())} tensors as {args.target}")
    if args.check:
        what, difference = compare_outputs(args.src, args.dst, head, fresh)
        print(f"largest difference of {what} between {args.src} and {args.dst} in transformers: {difference:.3g}")
    return 0


def compare_outputs(src: Path, dst: Path, head: str, fresh_head: bool, num_tokens: int = 32) -> tuple[str, float]:
    """What was compared, and its largest absolute difference on random tokens, computed by transformers in float32.

    Logits (or scores); the last hidden states where SRC has no head to compare with.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    if fresh_head:
        loader, what = AutoModel, "hidden states"
    else:
        loader, what = (AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification), "logits"

    def outputs(directory: Path) -> torch.Tensor:
        model = loader.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (1, num_tokens), generator=generator)
        with torch.no_grad():
            result = model(tokens)
        return result.last_hidden_state if fresh_head else result.logits

    return what, float((outputs(src) - outputs(dst)).abs().max())


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
