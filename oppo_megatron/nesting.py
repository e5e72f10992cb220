"""Refuses JSON and YAML whose nesting may overflow their parsers' stack, and text that no file or tokenizer takes."""

from __future__ import annotations

import json
import re
from typing import Any

from oppo_megatron.errors import DataError

DEEPEST = 100
"""Nested lists and objects in JSON; low enough for other programs."""
DEEPEST_YAML = 20
"""Nested sections in YAML; omegaconf needs about ten calls per level."""
MOST_NODES = 100_000
"""Keys and values of one YAML text, aliases expanded."""
STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
LEVEL = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_json(text: str | bytes, **options: Any) -> Any:
    """`json.loads` up to `DEEPEST`.  Raises ValueError."""
    text = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
    check_json(text)
    return json.loads(text, **options)


def read_strict_json(text: str, **options: Any) -> Any:
    """Refuse duplicate names, NaN and infinity, too."""
    return read_json(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct, **options)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if any(name == other for other, _ in pairs[:i]))
        raise ValueError(f"the name {twice!r:.60} comes twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def check_json(text: str) -> None:
    """Raise DataError if nested beyond `DEEPEST`."""
    if too_deep_at(text) is not None:
        raise DataError(f"lists or objects are nested deeper than {DEEPEST}; leave them out, or flatten them")


def too_deep_at(text: str, deepest: int = DEEPEST) -> int | None:
    """Position of the first bracket beyond `deepest`, or None."""
    if text.count("[") + text.count("{") <= deepest:
        return None
    level = 0
    for found in STRING_OR_BRACKET.finditer(text):
        level += LEVEL.get(found[0], 0)
        if level > deepest:
            return found.start()
    return None


def check_value(value: Any, deepest: int = DEEPEST) -> None:
    """Raise DataError if nested deeper."""
    level: list[Any] = [value]
    for _ in range(deepest + 1):
        level = [
            part
            for item in level
            if isinstance(item, (dict, list, tuple))
            for part in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise DataError(f"lists or objects are nested deeper than {deepest}; leave them out, or flatten them")


def text_fault(text: str) -> str | None:
    """Name a NUL or half a surrogate pair, which tokenizers do not accept."""
    if (place := text.find("\0")) >= 0:
        return f"has a NUL at character {place}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"is not text: half of a surrogate pair at character {error.start}"
    return None


def read_yaml(text: str | bytes) -> Any:
    """`yaml.safe_load`.  Raises YAMLError or ValueError."""
    import yaml

    check_yaml(text)
    return yaml.safe_load(text)


def check_yaml(text: str | bytes) -> set[str]:
    """Return values with a reference `${`.  Raises DataError if too deep or large with aliases expanded, else YAMLError."""
    import yaml

    known: dict[str, tuple[int, int]] = {}  # by anchor: levels and nodes below it
    opened: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # the document, then the collections around the event
    references = set()
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, 1, 1))
            levels = 0
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _, _ in opened):
                raise DataError(f"the alias of line {line} holds itself; write it out")
            levels = _close(opened, None, *known.get(event.anchor or "", (0, 1)), known)
        elif isinstance(event, yaml.ScalarEvent):
            references |= {event.value} if "${" in event.value else set()
            levels = _close(opened, event.anchor, 0, 1, known)
        elif isinstance(event, yaml.CollectionEndEvent):
            levels = _close(opened, *opened.pop(), known)
        else:
            continue
        if len(opened) - 1 + levels > DEEPEST_YAML:
            raise DataError(
                f"line {line} is nested too deeply: a configuration has sections within sections, at most "
                f"{DEEPEST_YAML}; flatten it"
            )
    if (total := opened[0][2]) > MOST_NODES:
        raise DataError(f"its aliases expand to {total:.3g} settings, more than {MOST_NODES}; write them out")
    return references


def _close(
    opened: list[tuple[str | None, int, int]], anchor: str | None, levels: int, nodes: int, known: dict[str, tuple[int, int]]
) -> int:
    if anchor is not None:
        known[anchor] = levels, nodes
    around, most, total = opened[-1]
    opened[-1] = around, max(most, levels + 1), total + nodes
    return levels
