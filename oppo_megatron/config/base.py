"""The strict base of every configuration section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section that refuses unknown keys and validates on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, protected_namespaces=())
