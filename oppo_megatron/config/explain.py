"""Turn pydantic's errors into one sentence each: the value, the rule, the remedy."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from oppo_megatron.config.base import Section

Path = tuple[str | int, ...]


def explain(kind: type[Section], error: ValidationError) -> list[str]:
    """Return one sentence per key with problems."""
    return [_sentence(kind, path, details) for path, details in _by_path(kind, error).items()]


def wrong_paths(kind: type[Section], error: ValidationError) -> list[Path]:
    """Keys with errors, innermost first."""
    return sorted(_by_path(kind, error), key=len, reverse=True)


def _by_path(kind: type[Section], error: ValidationError) -> dict[Path, list[ErrorDetails]]:
    """Errors by key; of a union's members, only those that lead furthest into the value."""
    found: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_data_path(kind, detail), []).append(detail)
    outer = {path[:end] for path in found for end in range(len(path))}
    return {path: details for path, details in found.items() if path not in outer}


def _sentence(kind: type[Section], path: Path, details: list[ErrorDetails]) -> str:
    name, first = dotted(path), details[0]
    if first["type"] == "extra_forbidden":
        return f"`{name}` is not a setting; {_suggest_key(kind, path)}"
    if first["type"] == "missing":
        return f"`{name}` is missing; add it{_described(kind, path)}"
    rules = " or ".join(dict.fromkeys(_rule(detail) for detail in details))
    if not path:  # a rule that ties sections together says all of it
        return rules
    return f"`{name}` is {_shown(first['input'])}, but must be {rules}; {_remedy(details)}"


RULES = {
    "string_too_long": "a text of at most {max_length} characters",
    "string_pattern_mismatch": "a text that matches the pattern `{pattern}`",
    "string_unicode": "a text in UTF-8",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "invalid_key": "a section whose keys are texts",
    "none_required": "null",
    "int_from_float": "an integer, without a fraction",
    "int_parsing_size": "an integer of fewer digits",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
    "dataclass_type": "a section of keys",
    "recursion_loop": "a value that does not hold itself",
}
"""Rules by the types of pydantic's errors whose messages are sentences of their own, or speak of Python."""


def _rule(detail: Mapping[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "string_too_short":
        least = context["min_length"]
        return "a text that is not empty" if least == 1 else f"a text of at least {least} characters"
    if kind in RULES:
        return RULES[kind].format(**context)
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message, asks = re.subn(r"^Input (should be|is not) ", "", message)
    if not asks and kind not in ("value_error", "assertion_error"):
        return f"otherwise ({message})"
    message = message.replace("a valid integer", "an integer").replace("a valid", "a")
    return message.replace("a path for <class 'pathlib.Path'>", "a path").partition(", unable to")[0]


def first_problem(error: ValidationError) -> str:
    """First problem, without its value, which may be secret."""
    detail = error.errors(include_url=False, include_input=False)[0]
    name = f"`{dotted(detail['loc'])}`" if detail["loc"] else "the whole"
    if detail["type"] == "extra_forbidden":
        return f"{name} is not known"
    return f"{name} is missing" if detail["type"] == "missing" else f"{name} must be {_rule(detail)}"


def _remedy(details: list[ErrorDetails]) -> str:
    """Suggest the nearest value, else the first detail's remedy."""
    for detail in (each for each in details if each["type"] == "literal_error"):
        choices = [str(choice).strip("'") for choice in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        near = difflib.get_close_matches(str(detail["input"]), choices, n=1)
        if near:
            return f"did you mean `{near[0]}`?"
    detail = details[0]
    if detail["type"] == "literal_error":
        return "choose one of these"
    if "than" in detail["type"] or "finite" in detail["type"]:
        return "give a value in that range"
    return "correct the value"


def _suggest_key(kind: type[Section], path: Path) -> str:
    """Suggest the section's nearest key, else this name elsewhere."""
    wrong = str(path[-1])
    section = _section_at(kind, path[:-1])
    near = difflib.get_close_matches(wrong, section.model_fields, n=1)
    if near:
        return f"did you mean `{dotted((*path[:-1], near[0]))}`?"
    elsewhere = [known for known in known_keys(kind) if known.rpartition(".")[2] == wrong]
    if elsewhere:
        near_by = (known for known in elsewhere if known.startswith(f"{dotted(path[:-1])}."))
        return f"did you mean `{next(near_by, elsewhere[0])}`?"
    return f"the settings here are: {', '.join(section.model_fields)}"


def known_keys(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield dotted keys, outermost first."""
    nested: list[tuple[str, type[Section]]] = []
    for name, field in kind.model_fields.items():
        yield prefix + name
        section = section_in(field.annotation)
        if section is not None and not has_list(field.annotation):
            nested.append((f"{prefix}{name}.", section))
    for inner_prefix, section in nested:
        yield from known_keys(section, inner_prefix)


def takes_null(kind: type[Section], path: list[str]) -> bool | None:
    """True if it may be null; None if unknown."""
    section: type[Section] | None = kind
    annotation: Any = None
    for part in path:
        if part.isdigit() and has_list(annotation):
            annotation = None
            continue
        if section is None or part not in section.model_fields:
            return None
        annotation = section.model_fields[part].annotation
        section = section_in(annotation)
    return annotation is Any or type(None) in get_args(annotation)


def _data_path(kind: type[Section], detail: ErrorDetails) -> Path:
    """pydantic's location without its tags for unions' members."""
    path: list[str | int] = []
    section: type[Section] | None = kind
    in_list = False
    for place, part in enumerate(detail["loc"], start=1):
        if in_list and isinstance(part, int):
            path.append(part)
            in_list = False
        elif section is not None and part in section.model_fields:
            annotation = section.model_fields[str(part)].annotation
            path.append(part)
            section = section_in(annotation)
            in_list = has_list(annotation)
        elif section is not None and detail["type"] == "extra_forbidden" and place == len(detail["loc"]):
            path.append(part)
    return tuple(path)


def _section_at(kind: type[Section], path: Path) -> type[Section]:
    section = kind
    for part in path:
        if isinstance(part, str):
            inner = section_in(section.model_fields[part].annotation)
            assert inner is not None, f"{part} of {section.__name__} is not a section"
            section = inner
    return section


def section_in(annotation: Any) -> type[Section] | None:
    """Section class inside `X`, `X | None` or `list[X]`."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, Section) else None
    return next((found for arg in get_args(annotation) if (found := section_in(arg)) is not None), None)


def has_list(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType):
        return any(has_list(arg) for arg in get_args(annotation))
    return get_origin(annotation) is list


def _described(kind: type[Section], path: Path) -> str:
    if not isinstance(path[-1], str):
        return ""
    description = _section_at(kind, path[:-1]).model_fields[path[-1]].description
    return f" ({description})" if description else ""


def dotted(path: Path) -> str:
    """`("rewards", 0, "weight")` -> `rewards.0.weight`."""
    return ".".join(str(part) for part in path)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
