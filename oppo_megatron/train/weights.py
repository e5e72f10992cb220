"""Writing a role's weights as a Hugging Face directory, its tokenizer beside them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from oppo_megatron.data.beside_weights import special_ids, write_beside
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.training import Chunks, as_chunks
from oppo_megatron.mcore.weights.hf_weights import export_weights
from oppo_megatron.mcore.weights.lora_weights import export_adapters
from oppo_megatron.rundir.disk import free_bytes, megabytes


def save_role(
    model: Chunks, directory: Path, tokenizer: Tokenizer, base: Path | None = None, stop_token_ids: Sequence[int] = ()
) -> None:
    """Every rank of the role makes the call; it returns when the directory is whole.

    Of a model with adapters these are written, as a peft directory that names `base` as what they stand beside.
    `stop_token_ids` end a response beside the tokenizer's own; `base` is also where other settings of generation come from.

    Raises CheckpointError on the rank that writes where it cannot.
    """
    chunks = as_chunks(model)
    first = chunks[0]
    groups = first.groups
    over = {"tp_group": groups.collection.tp, "pp_group": groups.collection.pp, "dp_group": groups.collection.dp}
    with tempfile.TemporaryDirectory() as folder:
        scored = first.head == "scalar"
        ids = special_ids(tokenizer, stop_token_ids, scored=scored)
        told = write_beside(Path(folder), tokenizer, ids, first.shape.family, scored=scored, source=base)
        if told is not None and groups.output_rank == dist.get_rank():
            print(told, file=sys.stderr, flush=True)
        files = sorted(Path(folder).iterdir())
        shape = replace(first.shape, hf={**first.shape.hf, **ids})
        try:
            if first.adapters is None:
                export_weights(chunks, shape, directory, head=first.head, extra_files=files, **over)
            else:
                export_adapters(chunks, directory, base, extra_files=files, **over)
        except OSError as error:
            raise CheckpointError(
                f"{directory}: the weights could not be written ({error.strerror or error}); {megabytes(free_bytes(directory))} "
                "are free there; free some, or move the run to a larger disk, and write them again: a run with checkpoints "
                "goes on from its last one with --resume"
            ) from error
