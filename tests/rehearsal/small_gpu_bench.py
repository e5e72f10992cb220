"""`oppo bench gpu` with a size of its own, `tiny`: `python -m tests.rehearsal.small_gpu_bench ARGUMENTS`."""

from __future__ import annotations

import sys

from oppo_megatron.bench.gpu import SIZES
from oppo_megatron.cli.main import main

TINY = {
    **SIZES["0.5B"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 512,
}  # fmt: skip

if __name__ == "__main__":
    SIZES["tiny"] = TINY
    sys.exit(main(["bench", "gpu", "--sizes", "tiny", *sys.argv[1:]]))
