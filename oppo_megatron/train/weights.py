"""Writing a role's weights as a Hugging Face directory, its tokenizer beside them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from oppo_megatron.checkpoint.space import free_bytes, megabytes
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.errors import CheckpointError
from oppo_megatron.runtime.mcore.hf_weights import export_weights
from oppo_megatron.runtime.mcore.lora_weights import export_adapters
from oppo_megatron.runtime.mcore.training import Chunks, as_chunks


def save_role(model: Chunks, directory: Path, tokenizer: Tokenizer, base: Path | None = None) -> None:
    """Every rank of the role makes the call; it returns when the directory is whole.

    Of a model with adapters these are written, as a peft directory that names `base` as what they stand beside.

    Raises CheckpointError on the rank that writes where it cannot.
    """
    chunks = as_chunks(model)
    first = chunks[0]
    groups = first.groups
    over = {"tp_group": groups.collection.tp, "pp_group": groups.collection.pp, "dp_group": groups.collection.dp}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        files = sorted(Path(folder).iterdir())
        try:
            if first.adapters is None:
                export_weights(chunks, first.shape, directory, head=first.head, extra_files=files, **over)
            else:
                export_adapters(chunks, directory, base, extra_files=files, **over)
        except OSError as error:
            raise CheckpointError(
                f"{directory}: the weights could not be written ({error.strerror or error}); {megabytes(free_bytes(directory))} "
                "are free there; free some, or move the run to a larger disk, and write them again: a run with checkpoints "
                "goes on from its last one with --resume"
            ) from error
