"""What a continued run is told otherwise than before, setting by setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

WITHOUT_EFFECT = ("run_dir", "checkpoint.resume")
"""Settings that say where and how a run is continued, not what it does."""

STARTING = ("checkpoint", "init", "init_seed", "fresh_head", "lora.adapter")
"""Of a trained role: what its weights were read from when the run began."""

SHOWN = 60
"""Characters of a value; what is longer is cut."""


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for every setting of a run that differs, in the order of its configuration.

    Where the run goes on with what its checkpoint holds, the line says that.  Both are plain trees of resolved settings.
    """
    old, new = dict(_leaves(then)), dict(_leaves(now))
    changed = [key for key in {**new, **old} if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    return [
        f"{key}: {_shown(old.get(key, _ABSENT))} -> {_shown(new.get(key, _ABSENT))}{_kept(key, now)}"
        for key in changed
        if key not in WITHOUT_EFFECT
    ]


def _kept(key: str, now: Mapping[str, Any]) -> str:
    """What goes on from the checkpoint in spite of a change."""
    role, _, name = key.partition(".")
    if role in ("actor", "critic", "model") and name.startswith(STARTING):
        return f" (the {role}'s weights are those of the checkpoint)"
    if key == "ppo.kl.coefficient" and _at(now, "ppo.kl.adaptive") is not None:
        return " (the adaptive coefficient goes on from the checkpoint)"
    if key == "overlap.delta.initial" and _at(now, "overlap.delta.rule") != "fixed":
        return " (delta goes on from the checkpoint)"
    if key == "overlap.chunk.tokens" and _at(now, "overlap.chunk.adaptive"):
        return " (the chunk size goes on from the checkpoint)"
    return ""


_ABSENT = object()


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; a list is one value, but for a list of sections."""
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        for index, item in enumerate(tree):
            yield from _leaves(item, f"{key}.{index}")
    else:
        yield key, tree


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
