"""The schema as a page of documentation: `python -m oppo_megatron.config.reference > docs/configuration.md`."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from oppo_megatron.config.base import Section
from oppo_megatron.config.explain import section_in
from oppo_megatron.config.run import SFTConfig, TrainSettings
from oppo_megatron.config.serve import ServeRewardConfig

INTRODUCTION = """\
# Configuration

Every setting of `oppo train`, `oppo sft`, `oppo rm` and `oppo serve-reward`, made from the schema in `oppo_megatron/config/` by
`python -m oppo_megatron.config.reference > docs/configuration.md`.

A configuration is a YAML file; settings given behind it on the command line replace those of the file:

    oppo train ppo.yaml rollout.batch_size=64 overlap.delta.rule=fixed

The right side is YAML too (`data.path=[a.jsonl,b.jsonl]`, `reference=null`). `${...}` in the file is resolved by
OmegaConf: `${actor.init}` repeats another setting, `${oc.env:NAME,default}` reads the environment. An unknown key is an
error that names the nearest known one. Relative paths start at the current directory. `oppo validate FILE` checks a
file, `--dry-run` prints it with every default filled in, and each run keeps that as `config.yaml`.
"""
COMMANDS: tuple[tuple[str, type[Section]], ...] = (
    ("`oppo train`", TrainSettings),
    ("`oppo sft` and `oppo rm`", SFTConfig),
    ("`oppo serve-reward`", ServeRewardConfig),
)
PLAIN_TYPES = {int: "integer", float: "number", bool: "`true` or `false`", str: "text", Path: "path"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def render_reference() -> str:
    """The whole page: a table for each command, then one for each section that they use."""
    parts = [INTRODUCTION]
    for title, command in COMMANDS:
        parts.append(f"## {title}\n\n{_table(command)}")
    parts.append("## Sections\n")
    for section, places in _sections().items():
        where = ", ".join(f"`{place}`" for place in places)
        parts.append(f"### {_title(section)}\n\nAt {where}.\n\n{_about(section)}\n\n{_table(section)}")
    return "\n".join(parts)


def _sections() -> dict[type[Section], list[str]]:
    """Each section class in the order of its first use, with the dotted keys it stands at."""
    places: dict[type[Section], list[str]] = {}
    for _, command in COMMANDS:
        for place, section in _nested(command, ""):
            known = places.setdefault(section, [])
            if place not in known:
                known.append(place)
    return places


def _nested(kind: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in kind.model_fields.items():
        section = section_in(field.annotation)
        if section is not None:
            place = prefix + name + ("[]" if get_origin(field.annotation) is list else "")
            yield place, section
            yield from _nested(section, place + ".")


def _table(section: type[Section]) -> str:
    lines = ["| setting | value | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        lines.append(f"| `{name}` | {_value(field)} | {_default(field)} | {meaning(field)} |")
    return "\n".join(lines) + "\n"


def meaning(field: FieldInfo) -> str:
    """What a setting does: its description, else what the section that it holds is."""
    section = section_in(field.annotation)
    if field.description or section is None:
        return (field.description or "").replace("|", "\\|")
    return _about(section).partition("\n\n")[0].replace("\n", " ").partition(".  ")[0].rstrip(".")


def _value(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([_type(field.annotation), *bounds])


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("`null`" if part is type(None) else _type(part) for part in arguments)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        title = _title(annotation)
        return f"[{title}](#{title.lower().replace(' ', '-')})"
    return PLAIN_TYPES[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "as listed there" if isinstance(value, Section) else f"`{json.dumps(value)}`"


def _title(section: type[Section]) -> str:
    """`TrainedRoleConfig` -> `Trained role`, `PlacementSettings` -> `Placement`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", section.__name__.removesuffix("Config").removesuffix("Settings"))
    return words if words.isupper() else words[0] + words[1:].lower()


def _about(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


if __name__ == "__main__":
    print(render_reference(), end="")
