"""The strict base of every configuration section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator
from typing_extensions import Self


@dataclass(frozen=True)
class Unit:
    """The unit of a setting's number, for the documentation.

    A name that ends in a unit (`timeout_s`) needs none; see `UNITS_OF_NAMES` of describe.py.  `Unit("")`: a pure number.
    """

    name: str


@dataclass(frozen=True)
class Choices:
    """The meaning of each value of a setting, as a table with a head."""

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


class Section(BaseModel):
    """Refuses unknown keys, booleans as numbers and infinities; validates on assignment."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Copy with other values of settings by dotted key, unchecked."""
        copy = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            copy = copy.model_copy(update={name: getattr(copy, name).with_values({rest: value}) if rest else value})
        return copy

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads `true` as 1; a user who writes it meant something else."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
            raise ValueError("a number, not a boolean")
        return value
