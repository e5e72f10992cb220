"""A user's callable by name: `package.module:function`, or `folder/file.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from oppo_megatron.errors import ConfigError
from oppo_megatron.rewards.user_code import said_of

CALL = "(prompt, response, fields)"


def load_entry_point(entry_point: str, options: Mapping[str, Any] | None = None) -> Any:
    """The function at `entry_point`, which takes (prompt, response, fields) and `options` as keywords.

    Raises `ConfigError` if it cannot be had, or cannot be called so.
    """
    name, colon, attribute = entry_point.rpartition(":")
    if not (name and colon and attribute):
        raise ConfigError(f"entry_point={entry_point!r} is not of the form package.module:function or file.py:function")
    found: Any = _module(name, entry_point)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "correct the name"
            raise ConfigError(f"entry_point={entry_point!r}: {name!r} has no {attribute!r}; {remedy}")
        found = getattr(found, part)
    _check_callable(found, entry_point, options or {})
    return found


def _module(name: str, entry_point: str) -> ModuleType:
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        raise ConfigError(
            f"entry_point={entry_point!r}: there is no file {name} (looked from {Path.cwd()}); correct the path"
        )
    try:
        return _from_file(Path(name)) if is_file else importlib.import_module(name)
    except (Exception, SystemExit) as error:
        file = Path(*name.split(".")).with_suffix(".py")
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            remedy = (
                f"name the file: `{file}:{entry_point.rpartition(':')[2]}`"
                if file.is_file()
                else ("install it, put its folder on PYTHONPATH, or name a file: `folder/file.py:function`")
            )
        elif isinstance(error, ImportError):
            remedy = "install what it imports, or put its folder on PYTHONPATH"
        else:
            remedy = "correct it: importing it must do nothing but define the function"
        kind = "file" if is_file else "module"
        raise ConfigError(
            f"entry_point={entry_point!r}: {kind} {name!r} cannot be imported ({said_of(error)}); {remedy}"
        ) from error


def _from_file(path: Path) -> ModuleType:
    """The module in a file; under a name of its own, so that no installed one is meant by it."""
    name = f"oppo_reward_{path.stem}_{abs(hash(path.resolve()))}"
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


def _check_callable(found: Any, entry_point: str, options: Mapping[str, Any]) -> None:
    define = f"define it as `def {entry_point.rpartition(':')[2].rpartition('.')[2]}(prompt, response, fields)`"
    if not callable(found):
        raise ConfigError(f"entry_point={entry_point!r} is a {type(found).__name__}, not a function of {CALL}")
    if inspect.isclass(found):
        raise ConfigError(
            f"entry_point={entry_point!r} is a class, and to call it gives no number; name a function of {CALL}"
        )
    if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found) or inspect.isgeneratorfunction(found):
        kind = "a generator" if inspect.isgeneratorfunction(found) else "async"
        raise ConfigError(
            f"entry_point={entry_point!r} is {kind}, and a call of it gives no number; {define}, which returns one"
        )
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # a function of native code that does not say
        return
    try:
        signature.bind("", "", {}, **options)
    except TypeError as error:
        given = f" and options {', '.join(options)}" if options else ""
        line = inspect.getsourcelines(found)[1] if inspect.isfunction(found) else None
        place = f" (line {line})" if line else ""
        raise ConfigError(
            f"entry_point={entry_point!r} takes {signature}{place}, but is called with {CALL}{given}: {error}; {define}, or "
            "correct options"
        ) from error
