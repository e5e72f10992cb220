"""Find the command that a configuration file is for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SUPERVISED = ("sft", "rm", "prm", "dpo", "kto")


def guess_kind(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the command that most of the keys belong to; among equals, one whose required keys are given.

    The overrides' keys count too.  `dpo` and `kto` have sections of that name; it is `prm` if steps have a separator or
    labels, else `rm` if the model starts from a fresh scalar head.
    """
    from oppo_megatron.config.load import read_tree

    tree = read_tree(path, overrides)
    keys = set(tree)
    known = ("train", "sft", "dpo", "kto", "serve")
    kind = max(known, key=lambda kind: (len(keys & _fields(kind)), not _lacking(kind, keys)))
    model = tree.get("model")
    if kind != "sft":
        return kind
    data = tree.get("data")
    columns = data.get("columns") if isinstance(data, dict) else None
    if "separator" in tree or (isinstance(columns, dict) and {"completions", "labels"} & columns.keys()):
        return "prm"
    return "rm" if isinstance(model, dict) and model.get("fresh_head") else kind


def require_kind(kind: str, path: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError for an empty file, and for one that lacks keys of `kind` but has all required keys of another command."""
    from oppo_megatron.config.load import read_tree
    from oppo_megatron.errors import ConfigError

    read_tree(path)  # an error in the file itself is reported alone
    try:
        keys, other = set(read_tree(path, overrides)), guess_kind(path, overrides)
    except ConfigError:
        return  # an invalid override is reported with all other problems
    if not keys:
        raise ConfigError(
            f"{path} is empty; write the settings of `oppo {kind}` into it, or begin with one that `oppo init` writes (--list)"
        )
    alike = {kind, other} <= set(SUPERVISED)
    if not alike and other != kind and _lacking(kind, keys) and not _lacking(other, keys):
        raise ConfigError(
            f"{path} is a configuration for `oppo {other}`, by its keys, and not for `oppo {kind}`; run `oppo {other} {path}`, "
            "or name another file"
        )


def _fields(kind: str) -> set[str]:
    from oppo_megatron.config.describe import COMMANDS

    return set(COMMANDS[kind].model_fields)


def _lacking(kind: str, keys: set[str]) -> set[str]:
    """Return the required keys that are not among `keys`."""
    from oppo_megatron.config.describe import COMMANDS

    if kind == "serve":
        return set() if keys & {"rewards", "reward"} else {"rewards"}
    return {name for name, field in COMMANDS[kind].model_fields.items() if field.is_required()} - keys
