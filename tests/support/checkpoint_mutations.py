"""Damaged checkpoints, a small deterministic mutation fuzzer, and a time limit for what they are let loose on."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from oppo_megatron.rundir.manifest import MANIFEST, list_files, seal, write_manifest

CANARY = "canary"  # what a pickle that is let run makes in the working directory's place named below
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 7, 10**6, 2**63, 10**40, 3.5, -0.5, 1e308, float("nan"), float("inf"), "", "x", "1", [], {},
    [[1, 2]], [1], {"a": 1}, [[0, 0], [0, 0]], "\ud800", "../../etc",
)  # fmt: skip
Mutation = Callable[[Path, random.Random], str]


class Evil:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def canary(folder: Path) -> Path:
    """A file that is there if a pickle of the checkpoint at `folder` was run."""
    return folder.parents[1] / CANARY


def mutate(folder: Path, number: int, seed: int) -> str:
    """The `number`-th mutation of the checkpoint at `folder`; says what was done.  The kinds take turns."""
    rng = random.Random(seed * 10007 + number)
    kind = KINDS[number % len(KINDS)]
    return f"{kind.__name__.strip('_')}: {kind(folder, rng)}"


def reseal(folder: Path) -> None:
    """The manifest says that what is there is what was written."""
    (folder / MANIFEST).unlink(missing_ok=True)
    write_manifest(folder, seal(folder, list_files(folder)))


def _bytes(folder: Path, rng: random.Random) -> str:
    path = folder / rng.choice([*list_files(folder), MANIFEST])
    return f"{path.relative_to(folder)} {damage_bytes(path, rng)}"


def damage_bytes(path: Path, rng: random.Random) -> str:
    data, what = path.read_bytes(), rng.choice(("flip", "cut", "extend", "empty", "not UTF-8", "zeros"))
    place = rng.randrange(len(data))
    before, after = data[:place], data[place:]
    damaged: dict[str, Callable[[], bytes]] = {
        "flip": lambda: before + bytes([after[0] ^ 1 << rng.randrange(8)]) + after[1:], "cut": lambda: before,
        "extend": lambda: data + rng.randbytes(rng.choice((1, 100))), "empty": lambda: b"",
        "not UTF-8": lambda: before + b"\xff\xfe\xed\xa0\x80" + after, "zeros": lambda: before + bytes(len(after)),
    }  # fmt: skip
    path.write_bytes(damaged[what]())
    return what


def _state(folder: Path, rng: random.Random) -> str:
    """state.json is JSON of another shape."""
    what = _other_json(folder / "state.json", rng)
    reseal(folder)
    return what


def _other_json(path: Path, rng: random.Random) -> str:
    tree = json.loads(path.read_text())
    what = damage_tree(tree, rng)
    path.write_text(json.dumps(tree))
    return what


def _rollouts(folder: Path, rng: random.Random) -> str:
    path = folder / "rollouts.jsonl"
    lines = path.read_text().splitlines()
    number, what = rng.randrange(len(lines)), rng.choice(("value", "value", "value", "again", "order", "text"))
    if what == "value":
        tree = json.loads(lines[number])
        what = damage_tree(tree, rng)
        lines[number] = json.dumps(tree)
    elif what == "again":
        lines.append(lines[number])
    elif what == "order":
        lines.reverse()
    else:
        lines[number] = rng.choice(("", "null", "[]", "{", "[" * 5000, "9" * 5000, '{"seq_id": 1, "seq_id": 2}'))
    path.write_text("\n".join(lines) + "\n")
    reseal(folder)
    return f"line {number}: {what}"


def _text(folder: Path, rng: random.Random) -> str:
    path = folder / rng.choice(("state.json", "rollouts.jsonl"))
    what = damage_bytes(path, rng)
    reseal(folder)
    return f"{path.name} {what}, sealed"


def _manifest(folder: Path, rng: random.Random) -> str:
    return _other_json(folder / MANIFEST, rng)


def _caches(folder: Path, rng: random.Random) -> str:
    """A sound safetensors file of other tensors, or of none."""
    path = next((folder / "caches").iterdir())
    with safe_open(path, framework="pt") as file:
        tensors, slots = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["slots"]
    name, what = (rng.choice(sorted(tensors)), rng.choice(("gone", "shape", "dtype", "longer", "renamed", "slots", "header")))
    if what == "gone":
        del tensors[name]
    elif what == "shape":
        tensors[name] = tensors[name].flatten()[:-1].reshape(-1, 1)
    elif what == "dtype":
        tensors[name] = tensors[name].to(torch.int32)
    elif what == "longer":
        tensors[name] = torch.cat([tensors[name], tensors[name]], dim=-1)
    elif what == "renamed":
        tensors[name + rng.choice(("0", "x", ".kv.1"))] = tensors.pop(name)
    elif what == "slots":
        slots = rng.choice(("", "null", "{}", "[]", '{"actor": [999]}', '{"actor": 1}', "[" * 5000, slots.replace("[", "[1, ")))
    save_file(tensors, path, {"slots": slots} if what != "header" else {})
    if what == "header" and rng.random() < 0.7:
        data = path.read_bytes()
        path.write_bytes(struct.pack("<Q", rng.choice((0, 1, 2**40, 2**63, len(data)))) + data[8:])
    reseal(folder)
    return f"{name} {what}"


def _index(folder: Path, rng: random.Random) -> str:
    path = folder / "models" / ".metadata"
    what = rng.choice(("evil", "evil", "bytes", "object", "path", "empty index"))
    if what == "evil":
        path.write_bytes(pickle.dumps(Evil(str(canary(folder)))))
    elif what == "bytes":
        what = damage_bytes(path, rng)
    elif what == "object":
        path.write_bytes(pickle.dumps(rng.choice((None, 1, [], {}, "x", torch.float32))))
    else:
        index = pickle.loads(path.read_bytes())
        if what == "path":
            info = next(iter(index.storage_data.values()))
            info.relative_path = rng.choice(("../state.json", "/etc/passwd", "nothing.distcp", "", ".metadata"))
        else:
            index.storage_data = rng.choice(({}, None, []))
        path.write_bytes(pickle.dumps(index))
    if sealed := rng.random() < 0.8:
        reseal(folder)
    return f"{what}{', sealed' if sealed else ''}"


def _models(folder: Path, rng: random.Random) -> str:
    """The rest of megatron-core's files, of another structure."""
    path = folder / "models" / rng.choice(("common.pt", "metadata.json", "metadata.json", "__0_0.distcp", "__0_0.distcp"))
    what = rng.choice(("cut", "empty", "evil", "text"))
    if what == "cut":
        path.write_bytes(path.read_bytes()[: rng.randrange(1, 60)])
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "evil":
        evil = io.BytesIO()
        torch.save(Evil(str(canary(folder))), evil)
        path.write_bytes(evil.getvalue())
    else:
        path.write_text(rng.choice(('{"sharded_backend": "zarr"}', "{}", "[]", "null", '{"sharded_backend": 1, "x": 2}')))
    reseal(folder)
    return f"{path.name} {what}, sealed"


def damage_tree(tree: Any, rng: random.Random) -> str:
    places = list(_places(tree, ()))
    path = rng.choice(places)
    node = tree
    for key in path[:-1]:
        node = node[key]
    key, what = path[-1], rng.choice(("value", "value", "value", "less", "more"))
    if what == "value":
        value = rng.choice(VALUES)
        node[key] = value
        what = f"= {str(value)[:20]!r}"
    elif what == "less":
        del node[key]
    elif isinstance(node, dict):
        node["surplus"] = 1
    else:
        node.append(node[key])
    return f"{'.'.join(str(part) for part in path)[:60]} {what}"


def _places(tree: Any, path: tuple[Any, ...]) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


KINDS: tuple[Mutation, ...] = (
    _bytes, _state, _rollouts, _index, _caches, _manifest, _text, _state, _models, _bytes,
)  # fmt: skip


def mutants(seeds: Sequence[bytes], dictionary: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """`count` variants of `seeds`: one to four cuts, repeats, flips, shuffled lines, insertions of `dictionary`."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            _mutate(data, dictionary, rng)
        yield bytes(data)


def _mutate(data: bytearray, dictionary: Sequence[bytes], rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 2, 8, 40)))
    kind = rng.choice((0, 1, 2, 3, 4, 5, 5, 5, 6))
    if kind == 0:
        del data[start:end]
    elif kind == 1:
        data[start:start] = data[start:end] * rng.randint(1, 3)
    elif kind == 2 and start < len(data):
        data[start] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del data[start:]
    elif kind == 4:
        lines = data.split(b"\n")
        rng.shuffle(lines)
        data[:] = b"\n".join(lines)
    elif kind == 5:  # a value, between what separates values
        places = [i + 1 for i, byte in enumerate(data) if byte in b":,[ ="] or [0]
        start = rng.choice(places)
        stop = next((i for i in range(start, len(data)) if data[i] in b",}]\n"), len(data))
        data[start:stop] = b" " + rng.choice(dictionary)
    else:
        data[start:start] = rng.choice(dictionary)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise AssertionError if the block takes more seconds of CPU time, which other work on the machine does not lengthen."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGPROF, expired)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
