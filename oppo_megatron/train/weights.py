"""Writing a role's weights as a Hugging Face directory, its tokenizer beside them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.runtime.mcore.hf_weights import export_weights
from oppo_megatron.runtime.mcore.training import Chunks, as_chunks


def save_role(model: Chunks, directory: Path, tokenizer: Tokenizer) -> None:
    """Every rank of the role makes the call; it returns when the directory is whole."""
    chunks = as_chunks(model)
    first = chunks[0]
    groups = first.groups
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        export_weights(
            chunks,
            first.shape,
            directory,
            head=first.head,
            tp_group=groups.collection.tp,
            pp_group=groups.collection.pp,
            dp_group=groups.collection.dp,
            extra_files=sorted(Path(folder).iterdir()),
        )
