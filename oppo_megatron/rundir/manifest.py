"""A folder's manifest: size and SHA-256 of each file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from oppo_megatron.errors import CheckpointError
from oppo_megatron.nesting import read_json

MANIFEST = "manifest.json"
FORMAT = 4
"""Format of the files under a manifest; changes when older files become unreadable."""
BLOCK_BYTES = 2**22


class OtherFormatError(CheckpointError):
    """Another version wrote the checkpoint; it is not damaged."""


@dataclass(frozen=True)
class Entry:
    size_bytes: int
    sha256: str


def list_files(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def seal(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    entries = {}
    for name in names:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
        entries[name] = describe(folder / name)
    return entries


def describe(path: Path) -> Entry:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
        return Entry(file.tell(), digest.hexdigest())


def write_manifest(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write and sync a checkpoint's last file."""
    tree = {"format": FORMAT, "files": {name: asdict(entry) for name, entry in sorted(entries.items())}}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(tree, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for path in (folder, *(sub for sub in folder.rglob("*") if sub.is_dir())):
        sync_folder(path)


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Raises CheckpointError if unreadable, OtherFormatError for another version's."""
    path = folder / MANIFEST
    try:
        tree = read_json(path.read_text(encoding="utf-8"))
        if type(tree["format"]) is not int:
            raise TypeError(f"format is {tree['format']!r:.20}")
        if tree["format"] != FORMAT:
            raise OtherFormatError(
                f"{path}: format {tree['format']}, this program reads format {FORMAT}; resume with the version that wrote it"
            )
        entries = {name: Entry(**entry) for name, entry in tree["files"].items()}
        for name, entry in entries.items():
            if not name.isprintable() or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{name!r:.100} is not a file of its folder")
            if type(entry.size_bytes) is not int or entry.size_bytes < 0 or not isinstance(entry.sha256, str):
                raise ValueError(f"{name}: {asdict(entry)!r:.100} is not a size and checksum")
        return entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: not a readable manifest ({type(error).__name__}: {error}); a complete checkpoint has one; resume from "
            "another checkpoint, or remove this one"
        ) from error


def find_misfits(folder: Path, entries: Mapping[str, Entry], required: Iterable[str], closed: Iterable[str]) -> str | None:
    """Describe the first required file not listed, or unlisted file in a `closed` folder."""
    for name in required:
        if name not in entries:
            return f"its manifest does not have {name}"
    for name in list_files(folder):
        if name not in entries and name.split("/")[0] in closed:
            return f"{name} is not in its manifest"
    return None


def find_damage(folder: Path, entries: Mapping[str, Entry], part: int = 0, parts: int = 1, checksums: bool = True) -> str | None:
    """Describe the first damaged file in share `part` of `parts`; without `checksums`: missing or of wrong size."""
    for name in sorted(entries)[part::parts]:
        path, due = folder / name, entries[name]
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != due.size_bytes:
            return f"{name} has {size} bytes, but {due.size_bytes} were written"
        if checksums and describe(path).sha256 != due.sha256:
            return f"{name} is not what was written: its SHA-256 differs"
    return None


def require_whole(folder: Path) -> None:
    damage = find_damage(folder, read_manifest(folder))
    if damage is not None:
        raise CheckpointError(f"{folder}: {damage}; resume from another checkpoint, or restore the file from a copy")


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
