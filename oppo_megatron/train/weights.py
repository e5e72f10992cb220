"""Writing a role's weights as a Hugging Face directory, its tokenizer beside them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.runtime.mcore.hf_weights import export_weights
from oppo_megatron.runtime.mcore.model import RoleModel


def save_role(model: RoleModel, directory: Path, tokenizer: Tokenizer) -> None:
    """Every rank of the role makes the call; it returns when the directory is whole."""
    groups = model.groups
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        export_weights(
            model,
            model.shape,
            directory,
            head=model.head,
            tp_group=groups.collection.tp,
            pp_group=groups.collection.pp,
            extra_files=sorted(Path(folder).iterdir()),
        )
