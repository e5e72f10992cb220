"""The strict base of every configuration section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


@dataclass(frozen=True)
class Unit:
    """What the number of a setting counts, for the documentation: `Annotated[int, Unit("prompts")]`.

    A setting whose last word is a unit (`timeout_s`, `max_prompt_tokens`) needs none; see `UNITS_OF_NAMES` of describe.py.
    `Unit("")`: a pure number.
    """

    name: str


@dataclass(frozen=True)
class Choices:
    """What each value of a setting stands for, as a table whose first row is its head, for `oppo config --explain`."""

    rows: tuple[tuple[str, ...], ...]


class Section(BaseModel):
    """A section that refuses unknown keys, booleans as numbers, infinities, and validates on assignment."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads `true` as 1; a user who writes it meant something else."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
            raise ValueError("a number, not a boolean")
        return value
