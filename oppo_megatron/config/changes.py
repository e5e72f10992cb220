"""The settings of a continued run that differ from before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

STARTING = ("checkpoint", "init", "lora.adapter")
"""Settings that named the source of a trained role's weights when the run began."""

SHOWN = 60


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return `key: old -> new` per difference, and if the checkpoint's value is kept."""
    return [
        f"{key}: {_shown(old)} -> {_shown(new)}{_kept(key, now)}" for key, old, new in _differences(then, now) if key != "run_dir"
    ]


def _kept(key: str, now: Mapping[str, Any]) -> str:
    role, _, name = key.partition(".")
    if role in ("actor", "critic", "model") and name.startswith(STARTING):
        return f" (the {role}'s weights come from the checkpoint)"
    if key == "ppo.kl.coefficient" and _at(now, "ppo.kl.target") is not None:
        return " (the adaptive coefficient continues from the checkpoint)"
    if key == "overlap.delta.initial" and _at(now, "overlap.delta.rule") != "fixed":
        return " (delta continues from the checkpoint)"
    if key == "overlap.chunk" and isinstance(_at(now, "overlap.chunk"), list):
        return " (the chunk size continues from the checkpoint)"
    return ""


_ABSENT = object()


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys with both values; sections or lists on one side only are one value."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**new, **old}:
            below = f"{key}.{name}" if key else str(name)
            yield from _differences(old.get(name, _ABSENT), new.get(name, _ABSENT), below)
    elif _are_sections(old) and _are_sections(new):
        for index, (one, other) in enumerate(zip_longest(old, new, fillvalue=_ABSENT)):
            yield from _differences(one, other, f"{key}.{index}")
    elif (None if old is _ABSENT else old) != (None if new is _ABSENT else new):  # null says no more than nothing does
        yield key, old, new


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = _plain(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _plain(value: Any) -> str:
    """YAML on one line, without null settings."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_plain(item)}" for name, item in value.items() if item is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
