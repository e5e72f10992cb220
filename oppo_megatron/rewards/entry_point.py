"""A user's callable by name."""

from __future__ import annotations

import importlib
from typing import Any

from oppo_megatron.errors import ConfigError


def load_entry_point(entry_point: str) -> Any:
    """The callable at `package.module:function`.  Raises `ConfigError` if it cannot be had."""
    module_name, colon, attribute = entry_point.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"entry_point={entry_point!r} is not of the form package.module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"entry_point={entry_point!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error})"
            "; install it, or put its folder on PYTHONPATH"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"entry_point={entry_point!r}: {module_name!r} has no {attribute!r}; correct the name")
        found = getattr(found, name)
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"entry_point={entry_point!r} is a {kind}, not a function of (prompt, response, fields)")
    return found
