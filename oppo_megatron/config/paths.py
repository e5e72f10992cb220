"""Messages about files and folders that a configuration names and the disk lacks."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oppo_megatron.config.base import Section


def missing_path(what: str, path: Path) -> str:
    """One sentence: `path` does not exist, where the trail ends, and which sibling has the nearest name."""
    existing = next((parent for parent in path.parents if parent.exists()), Path(path.anchor))
    wanted = path.relative_to(existing).parts[0]
    if not existing.is_dir():
        return f"{what} `{path}` does not exist: `{existing}` is a file, not a folder; correct the path"
    near = difflib.get_close_matches(wanted, sorted(entry.name for entry in existing.iterdir()), n=1, cutoff=0.5)
    if near:
        return f"{what} `{path}` does not exist; did you mean `{existing / near[0]}`?"
    return f"{what} `{path}` does not exist: `{existing}` has no `{wanted}`; correct the path or create it first"


def check_exists(what: str, path: Path) -> list[str]:
    """A problem where `path` is missing, else nothing."""
    return [] if path.exists() else [missing_path(what, path)]


def check_files(what: str, path: Path) -> list[str]:
    """A problem where `path` is missing and, where it is a pattern, matches no file."""
    if path.exists():
        return []
    if glob.has_magic(str(path)):
        if any(Path(found).is_file() for found in glob.iglob(str(path), recursive=True)):
            return []
        return [f"{what} `{path}` is a pattern that no file matches (looked from {Path.cwd()}); correct it"]
    problem = missing_path(what, path)
    if len(path.parts) == 2 and not path.is_absolute() and not path.suffix and not path.parent.exists():
        problem += (
            "; if it names a data set of the Hugging Face hub, fetch it first: "
            f"`datasets.load_dataset('{path}').save_to_disk('{path.name}')`"
        )
    return [problem]


def named_paths(value: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    """Every path in a configuration with its dotted key, in the order of the schema."""
    if isinstance(value, Path):
        yield key, value
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from named_paths(getattr(value, name), f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from named_paths(item, f"{key}.{index}")
