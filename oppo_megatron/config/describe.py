"""Meaning, values, unit and default of settings, for `oppo config` and the page of all settings (`tools/reference.py`)."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from oppo_megatron.config.base import Choices, Section, Unit, leaves
from oppo_megatron.config.explain import has_list, section_in
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.config.supervised import DPOConfig, RewardModelConfig, SFTConfig, SupervisedConfig

SUPERVISED: dict[str, type[SupervisedConfig]] = {"sft": SFTConfig, "rm": RewardModelConfig, "dpo": DPOConfig}
"""The commands that train one model on rows."""

COMMANDS: dict[str, type[Section]] = {"train": TrainSettings, **SUPERVISED, "serve": ServeConfig}
"""The commands that take a configuration, and its schema."""

UNITS_OF_NAMES = {"s": "s", "mb": "MiB", "bytes": "bytes", "tokens": "tokens", "steps": "steps", "rows": "rows"}
"""Units that the last word of a setting's name says."""

PLAIN_TYPES = {int: "integer", float: "number", bool: "`true` or `false`", str: "text", Path: "path"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
LISTED = "as listed there"


@dataclass(frozen=True)
class Setting:
    """A key of a schema.  `key` is dotted; a list of sections has `[]` after its name."""

    key: str
    field: FieldInfo

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def section(self) -> type[Section] | None:
        """Section that it holds, or of its list's elements."""
        return section_in(self.field.annotation)

    @property
    def is_list(self) -> bool:
        return has_list(self.field.annotation)

    @property
    def meaning(self) -> str:
        """Its description, else its section's first sentence."""
        if self.field.description or self.section is None:
            return self.field.description or ""
        return about(self.section).partition("\n\n")[0].replace("\n", " ").partition(".  ")[0].rstrip(".")

    @property
    def is_number(self) -> bool:
        return any(part in (int, float) for part in leaves(self.field.annotation))

    @property
    def unit(self) -> str | None:
        """Unit of its number; empty if pure, None without a number."""
        if not self.is_number:
            return None
        given = [rule.name for rule in self.field.metadata if isinstance(rule, Unit)]
        return given[0] if given else UNITS_OF_NAMES.get(self.name.rpartition("_")[2])

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return next((rule.rows for rule in self.field.metadata if isinstance(rule, Choices)), ())

    @property
    def default(self) -> str:
        """As YAML; `required`, or `as listed there` for a section's own defaults."""
        if self.field.is_required():
            return "required"
        value = self.field.get_default(call_default_factory=True)
        return LISTED if isinstance(value, Section) else json.dumps(value, default=str)

    def values(self, of_section: Callable[[type[Section]], str]) -> str:
        """Type with choices and bounds; `of_section` names a section."""
        return ", ".join([_type(self.field.annotation, of_section), *_bounds(self.field.metadata)])


def settings_in(section: type[Section], prefix: str = "") -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        yield Setting(prefix + name, field)


def all_settings(kind: type[Section], prefix: str = "") -> Iterator[Setting]:
    """Yield every key; a section's keys follow its own."""
    for setting in settings_in(kind, prefix):
        yield setting
        if setting.section is not None:
            yield from all_settings(setting.section, setting.key + ("[]." if setting.is_list else "."))


def find_setting(kind: type[Section], key: str) -> Setting | None:
    """`rewards.kind`, `rewards[].kind`, `rewards.0.kind` are the same."""
    wanted = plain_key(key)
    return next((setting for setting in all_settings(kind) if plain_key(setting.key) == wanted), None)


def plain_key(key: str) -> str:
    """Remove places in lists: `rewards.0.kind` -> `rewards.kind`."""
    return re.sub(r"\[\d*\]|\.\d+(?=\.|$)", "", key).strip(".")


def near_keys(kinds: dict[str, type[Section]], key: str, most: int = 3) -> list[str]:
    """Return keys with the same last name, else the nearest in spelling."""
    known = list(dict.fromkeys(setting.key for kind in kinds.values() for setting in all_settings(kind)))
    wanted = plain_key(key)
    last = wanted.rpartition(".")[2]
    spelled = difflib.get_close_matches(wanted, known, n=most, cutoff=0.7)
    same = [each for each in known if each.rpartition(".")[2] == last]
    same.sort(key=lambda each: -difflib.SequenceMatcher(None, wanted, each).ratio())
    names = difflib.get_close_matches(last, {each.rpartition(".")[2] for each in known}, n=1)
    similar = [each for each in known if each.rpartition(".")[2] in names]
    return list(dict.fromkeys([*same, *spelled, *similar]))[:most]


def about(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def _type(annotation: Any, of_section: Callable[[type[Section]], str]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("`null`" if part is type(None) else _type(part, of_section) for part in arguments)
    if origin is Annotated:
        return " ".join([_type(arguments[0], of_section), *_bounds(arguments[1:])])
    if origin is list:
        return f"list of {_type(arguments[0], of_section)}"
    if origin is tuple:
        return f"[{', '.join(_type(part, of_section) for part in arguments)}]"
    if origin is dict:
        return f"mapping of {_type(arguments[0], of_section)}" if get_origin(arguments[0]) is Literal else "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return of_section(annotation)
    return PLAIN_TYPES[annotation]


def _bounds(rules: Any) -> list[str]:
    return [
        f"{sign} {getattr(rule, name):g}"
        for rule in rules
        for name, sign in BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
