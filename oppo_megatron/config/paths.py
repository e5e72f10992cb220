"""Files that a configuration names and the disk lacks, and secrets that it must not show."""

from __future__ import annotations

import difflib
import glob
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from oppo_megatron.config.base import Section

SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
"""Special files, whose reading would block or never end."""


def irregular_path(what: str, path: Path, remedy: str = "write its content to a file, and name that") -> str | None:
    """Return a sentence if `path` is neither file nor folder."""
    kind = SPECIAL.get(stat.S_IFMT(path.stat().st_mode)) if path.exists() else None
    if kind is None:
        return None
    return f"{what} `{path}` is {kind}, and not a regular file; {remedy}"


def missing_path(what: str, path: Path) -> str:
    """Return a sentence with the first missing part, or its kind, and the nearest sibling."""
    if irregular := irregular_path(what, path):
        return irregular
    if path.is_dir():
        return f"{what} `{path}` is a folder, but must be a file; name the file"
    if path.exists():
        return f"{what} `{path}` is a file, but must be a folder; name the folder"
    existing = next((parent for parent in path.parents if parent.exists()), Path(path.anchor))
    wanted = path.relative_to(existing).parts[0]
    if not existing.is_dir():
        return f"{what} `{path}` does not exist: `{existing}` is a file, not a folder; correct the path"
    near = difflib.get_close_matches(wanted, sorted(entry.name for entry in existing.iterdir()), n=1, cutoff=0.5)
    if near:
        return f"{what} `{path}` does not exist; did you mean `{existing / near[0]}`?"
    return f"{what} `{path}` does not exist: `{existing}` has no `{wanted}`; correct the path or create it first"


def folders_with(names: Sequence[str], directory: Path) -> list[Path]:
    """Folders in a directory or run with one of the files, final weights first."""
    patterns = ("weights", "weights/*", "models/*", "best", "best/*", "*", "checkpoints/*/models/*")
    found = (path for pattern in patterns for path in sorted(directory.glob(pattern), reverse="checkpoints" in pattern))
    return list(dict.fromkeys(path for path in found if any((path / name).is_file() for name in names)))


def missing_within(what: str, path: Path) -> str:
    """As `missing_path`, with folders within that have the file."""
    folder = path.parent
    inner = folders_with([path.name, "adapter_config.json"], folder) if folder.is_dir() else []
    if not inner:
        is_run = (folder / "config.yaml").is_file()
        without = f"`{folder}` is the directory of a run without such weights; name one that has them"
        return f"{what} `{path}` does not exist: {without}" if is_run else missing_path(what, path)
    named = " or ".join(f"`{each}`" for each in inner[:3])
    return f"{what} `{path}` does not exist: `{folder}` is not the folder of a model, but holds some; name {named}"


def check_exists(what: str, path: Path) -> list[str]:
    """Return a problem if missing or irregular."""
    if irregular := irregular_path(what, path):
        return [irregular]
    return [] if path.exists() else [missing_path(what, path)]


def check_files(what: str, path: Path) -> list[str]:
    """Return a problem if missing (also as a pattern) or irregular."""
    if path.exists():
        return check_exists(what, path)
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
    """Yield every path with its dotted key."""
    if isinstance(value, Path):
        yield key, value
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from named_paths(getattr(value, name), f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from named_paths(item, f"{key}.{index}")


SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)S?(?:_|$)", re.IGNORECASE)
SHORTEST = 8  # a shorter value may occur in a text by chance


def shown_secrets(settings: Any, environment: Mapping[str, str]) -> list[str]:
    """Return a sentence, without the value, per setting with a secret variable's value."""
    secrets = {name: value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST}
    return [
        f"`{key}` holds the value of the environment variable {name}, by its name a secret, and the run's config.yaml would "
        "show it; leave it out: libraries read it from the environment themselves"
        for key, text in texts_of(settings)
        for name, value in secrets.items()
        if value in text
    ]


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a tree of settings with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from texts_of(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from texts_of(item, f"{key}.{index}")
