"""Finds the command that a configuration file is for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SUPERVISED = ("sft", "rm", "dpo", "kto")
SERVICES = ("serve-reward", "serve-scorer")


def guess_kind(path: Path, overrides: Sequence[str] = ()) -> str:
    """The command that most of the keys belong to; where several have as many, one that they are enough for.

    The overrides' keys count beside the file's.  `rm` where a model starts from a fresh scalar head; `dpo` and `kto` by their
    sections of that name.
    """
    from oppo_megatron.config.load import read_tree

    tree = read_tree(path, overrides)
    keys = set(tree)
    known = ("train", "sft", "dpo", "kto", *SERVICES)
    kind = max(known, key=lambda kind: (len(keys & _fields(kind)), not _required(kind) - keys))
    model = tree.get("model")
    return "rm" if kind == "sft" and isinstance(model, dict) and model.get("fresh_head") else kind


def require_kind(kind: str, path: Path, overrides: Sequence[str]) -> None:
    """Raises ConfigError for an empty file, and for one that lacks what `kind` needs and has all that another command needs."""
    from oppo_megatron.config.load import read_tree
    from oppo_megatron.errors import ConfigError

    read_tree(path)  # a fault of the file itself is reported alone
    try:
        keys, other = set(read_tree(path, overrides)), guess_kind(path, overrides)
    except ConfigError:
        return  # a faulty override is reported with all other problems
    if not keys:
        raise ConfigError(
            f"{path} is empty; write the settings of `oppo {kind}` into it, or begin with one that `oppo init` writes (--list)"
        )
    alike = {kind, other} <= set(SUPERVISED)
    if not alike and other != kind and _required(kind) - keys and not _required(other) - keys:
        raise ConfigError(
            f"{path} is a configuration for `oppo {other}`, by its keys, and not for `oppo {kind}`; run `oppo {other} {path}`, "
            "or name another file"
        )


def _fields(kind: str) -> set[str]:
    from oppo_megatron.config.describe import COMMANDS

    return set(COMMANDS[kind].model_fields)


def _required(kind: str) -> set[str]:
    from oppo_megatron.config.describe import COMMANDS

    return {name for name, field in COMMANDS[kind].model_fields.items() if field.is_required()}
