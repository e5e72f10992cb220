"""Single files of large packages, imported without what their packages import: no ray, no deepspeed, no tensordict."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def bare_package(name: str, **names: Any) -> None:
    """A package whose modules can be imported, of whose `__init__` nothing is run; `names` are what it has instead."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top) if top not in sys.modules else sys.modules[top].__spec__
    assert spec is not None and spec.submodule_search_locations
    module = types.ModuleType(name)
    module.__path__ = [str(Path(spec.submodule_search_locations[0]).joinpath(*rest))]
    module.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    _enter(module, names)


def stand_in(name: str, **names: Any) -> None:
    """A module that has these names and no more, within a package that is bare."""
    _enter(types.ModuleType(name), names)


@contextmanager
def absent(**packages: dict[str, Any]) -> Iterator[None]:
    for name, names in packages.items():
        assert name not in sys.modules, name
        _enter(types.ModuleType(name), names)
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]


def _enter(module: types.ModuleType, names: dict[str, Any]) -> None:
    vars(module).update(names)
    sys.modules[module.__name__] = module
    parent, _, own = module.__name__.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
