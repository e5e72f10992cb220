"""The strict base of every configuration section."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator
from typing_extensions import Self


@dataclass(frozen=True)
class Unit:
    """The unit of a number, for the documentation; "": a pure number.  A name that ends in its unit (`timeout_s`) needs none."""

    name: str


@dataclass(frozen=True)
class Choices:
    """The meaning of each value, as a table with a head."""

    rows: tuple[tuple[str, ...], ...]


IMPORT_PATH = re.compile(r"(?:[\w.]+|.+\.py):[\w.]+")


def _check_function(value: str | dict[str, Any]) -> str | dict[str, Any]:
    path = value.get("entry_point") if isinstance(value, dict) else value
    options = value.get("options", {}) if isinstance(value, dict) else {}
    known = not isinstance(value, dict) or value.keys() <= {"entry_point", "options"}
    if not (known and isinstance(options, dict) and isinstance(path, str) and IMPORT_PATH.fullmatch(path)):
        raise ValueError("a function `package.module:function` or `file.py:function`, or {entry_point: ..., options: {...}}")
    return value


FunctionPath = Annotated[str | dict[str, Any], AfterValidator(_check_function)]
"""A user's function: an import path, or a mapping of `entry_point` and its keyword arguments `options`."""


def _check_path(value: str) -> str:
    if not IMPORT_PATH.fullmatch(value):
        raise ValueError("a function `package.module:function` or `file.py:function`")
    return value


ImportPath = Annotated[str, AfterValidator(_check_path)]
"""A user's function without options."""


def leaves(annotation: Any) -> Iterator[Any]:
    """Yield the plain types within unions, lists and `Annotated`."""
    if get_origin(annotation) is Annotated:
        yield from leaves(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType, list):
        for part in get_args(annotation):
            yield from leaves(part)
    else:
        yield annotation


class Section(BaseModel):
    """Refuses unknown keys, booleans as numbers and infinities; validates on assignment."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Copy with other values by dotted key, unchecked."""
        copy = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            copy = copy.model_copy(update={name: getattr(copy, name).with_values({rest: value}) if rest else value})
        return copy

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads `true` as 1."""
        assert info.field_name is not None
        kinds = set(leaves(cls.model_fields[info.field_name].annotation))
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("a number, not a boolean")
        return value
