"""Load a user's functions by import path: `package.module:function`, or `folder/file.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from oppo_megatron.errors import ConfigError, PluginError

IMPORTING = str(Path(importlib.__file__).parent)
OWN = tuple(str(Path(__file__).parent / name) for name in ("plugins.py", "rewards", "algorithms", "control", "schedule"))
LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
SHOWN_CHARACTERS = 500


@dataclass(frozen=True)
class Signature:
    arguments: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        return f"({', '.join(self.arguments)})"


REWARD = Signature(("prompt", "response", "fields"), "number")
SIGNATURES = {
    "algorithm.advantage": Signature(("batch",), "tensor"),
    "algorithm.loss": Signature(("response",), "tensor"),
    "overlap.delta.rule": Signature(("signals", "delta", "memory"), "number"),
    "overlap.schedule": Signature(("round", "site", "costs"), "Schedule"),
}
"""Settings that take a user's function."""


def load_entry_point(
    entry_point: str, options: Mapping[str, Any] | None = None, signature: Signature = REWARD, setting: str = "entry_point"
) -> Any:
    """Return a function with its `options` bound.  Raises ConfigError naming the `setting`."""
    given = f"{setting}={entry_point!r}"
    name, colon, attribute = entry_point.rpartition(":")
    if not (name and colon and attribute):
        raise ConfigError(f"{given} is not of the form package.module:function or file.py:function")
    found: Any = _module(name, attribute, given)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "correct the name"
            raise ConfigError(f"{given}: {name!r} has no {attribute!r}; {remedy}")
        found = getattr(found, part)
    _check_callable(found, attribute, given, signature, options or {})
    return found


@dataclass(frozen=True)
class Plugin:
    """A user's function.  Raises PluginError with the user's line."""

    function: Callable[..., Any]
    label: str

    @classmethod
    def load(cls, setting: str, value: str | Mapping[str, Any]) -> Plugin:
        """`value`: import path, or mapping of `entry_point` and `options`."""
        entry_point, options = (value, {}) if isinstance(value, str) else (value["entry_point"], value.get("options") or {})
        function = load_entry_point(entry_point, options, SIGNATURES[setting], setting)
        return cls(partial(function, **options) if options else function, f"{setting} {entry_point}")

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.function(*arguments)
        except (Exception, SystemExit) as error:
            raise PluginError(f"{self.label} failed ({said_of(error)}); correct the function") from error

    def refuse(self, fault: str, remedy: str) -> PluginError:
        return PluginError(f"{self.label} {fault}; {remedy}")


def said_of(error: BaseException) -> str:
    """Class, message, and the user's line."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}, {error.filename}:{error.lineno}"
    name = "sys.exit" if isinstance(error, SystemExit) else type(error).__name__
    said = " ".join(str(error).split())[:SHOWN_CHARACTERS]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*OWN, IMPORTING, "<frozen"))
    ]
    users = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames
    at = "".join(f" at {frame.filename}:{frame.lineno} in {frame.name}" for frame in users[-1:])
    return (f"{name}: {said}" if said else name) + at


def _module(name: str, attribute: str, given: str) -> ModuleType:
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        raise ConfigError(f"{given}: {name} does not exist (looked from {Path.cwd()}); correct the path")
    try:
        return _from_file(Path(name)) if is_file else importlib.import_module(name)
    except (Exception, SystemExit) as error:
        file = Path(*name.split(".")).with_suffix(".py")
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            remedy = "install it, put its folder on PYTHONPATH, or name a file: `folder/file.py:function`"
            if file.is_file():
                remedy = f"name the file: `{file}:{attribute}`"
        elif isinstance(error, ImportError):
            remedy = "install what it imports, or put its folder on PYTHONPATH"
        else:
            remedy = "correct it: importing it must do nothing but define the function"
        kind = "file" if is_file else "module"
        raise ConfigError(f"{given}: {kind} {name!r} cannot be imported ({said_of(error)}); {remedy}") from error


def _from_file(path: Path) -> ModuleType:
    # An edited file is another module, so that a notebook calls the present function.
    name = f"oppo_plugin_{path.stem}_{abs(hash((path.resolve(), path.stat().st_mtime_ns)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_callable(found: Any, attribute: str, given: str, signature: Signature, options: Mapping[str, Any]) -> None:
    define = f"define it as `def {attribute.rpartition('.')[2]}{signature}`"
    if not callable(found):
        raise ConfigError(f"{given} is of type {type(found).__name__}, not a function of {signature}")
    if inspect.isclass(found):
        raise ConfigError(f"{given} is a class, and to call it gives no {signature.result}; name a function of {signature}")
    if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found) or inspect.isgeneratorfunction(found):
        kind = "a generator" if inspect.isgeneratorfunction(found) else "async"
        raise ConfigError(f"{given} is {kind}, and a call of it gives no {signature.result}; {define}, which returns one")
    try:
        parameters = inspect.signature(found)
    except (ValueError, TypeError):  # a function of native code that does not say
        return
    try:
        parameters.bind(*signature.arguments, **options)
    except TypeError as error:
        added = f" and options {', '.join(options)}" if options else ""
        line = inspect.getsourcelines(found)[1] if inspect.isfunction(found) else None
        place = f" (line {line})" if line else ""
        raise ConfigError(
            f"{given} takes {parameters}{place}, but is called with {signature}{added}: {error}; {define}, or correct options"
        ) from error
