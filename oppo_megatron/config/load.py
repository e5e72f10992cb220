"""YAML plus dotted overrides into a typed configuration, and back.  Relative paths start at the current directory."""

from __future__ import annotations

import codecs
import os
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from oppo_megatron.config.base import Section
from oppo_megatron.config.explain import explain, takes_null, wrong_paths
from oppo_megatron.config.paths import missing_path, shown_secrets, texts_of
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.nesting import DEEPEST_YAML, check_yaml, text_fault

MOST_REFERENCES = 50
"""Different references of one file: each may lead to the next one."""
DEEPEST_REFERENCE = 30
"""Brackets within each other in a value with a reference."""

REMEDIES = {
    "'\\t'": "YAML takes no tabs at the beginning of a line: put spaces there",
    "found duplicate key": "the same key is given twice in one section: remove one of the two",
    "could not find expected ':'": "write `key: value`, with a colon and a space; the line may be the one before",
    "mapping values are not allowed here": (
        "a value that holds `: ` is put in quotes; else give the line before its colon and a space, or correct the indentation"
    ),
    "did not find expected '-' indicator": "the entries of a list begin in one column, each with `- `",
    "expected <block end>": "the keys of one section begin in one column: correct the indentation",
    "expected ',' or '": "a bracket or brace is not closed, or a comma is missing: correct it there or in the lines before",
    "while scanning a quoted scalar": "a quotation mark is not closed: add it, there or in the lines before",
    "that cannot start any token": "put the value in quotes",
    "undefined alias": "a value that begins with `*` is put in quotes",
    "special characters are not allowed": "remove the control character there",
}
"""Remedies for faults of YAML, by words of the parser's message; the first that fits is taken."""

SectionT = TypeVar("SectionT", bound=Section)


def load_config(
    kind: type[SectionT],
    path: str | Path,
    overrides: Sequence[str] = (),
    check: Callable[[SectionT], Sequence[str]] | None = None,
) -> SectionT:
    """Read `path`, apply `overrides` (`a.b=c`, `c` in YAML; null removes a key that cannot be null) and build a `kind`.

    Raises ConfigError with every problem, also of `check`, which sees the rest if single keys are wrong.
    """
    tree, overrides = _without_removed(kind, _read_yaml(Path(path)), overrides)
    problems = _apply_overrides(tree, overrides)
    try:
        data = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError([*problems, f"`{error.full_key}` cannot be resolved: {reason}; correct the reference"]) from error
    if secrets := shown_secrets(data, os.environ):
        raise ConfigError(secrets)  # before anything else could show them
    if faults := [f"`{key}` {fault}; remove it" for key, text in texts_of(data) if (fault := text_fault(text))]:
        raise ConfigError([*problems, *faults])
    config: SectionT | None
    wrong: Sequence[Sequence[str | int]] = ()
    try:
        config = kind.model_validate(data)
    except ValidationError as error:
        problems += explain(kind, error)
        wrong = wrong_paths(kind, error)
        config = _without_wrong_keys(kind, data, wrong)
    if check is not None and config is not None:
        problems += [problem for problem in check(config) if not any(_misses(problem, path) for path in wrong)]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def dump_config(config: Section, path: str | Path) -> None:
    """Write every setting, whole or not at all (several ranks may write the same file)."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(config_yaml(config), encoding="utf-8")
    partial.replace(target)


def config_yaml(config: Section) -> str:
    """The text that `dump_config` writes."""
    return OmegaConf.to_yaml(OmegaConf.create(plain_settings(config)))


def plain_settings(config: Section) -> dict[str, Any]:
    """The tree read from that text."""
    return {key: _plain(value) for key, value in config.model_dump().items()}


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> dict[Any, Any]:
    """Read a mapping with applicable overrides, interpolations unresolved."""
    read = _read_yaml(Path(path))
    _apply_overrides(read, overrides)  # `load_config` reports their faults
    tree = OmegaConf.to_container(read)
    assert isinstance(tree, dict), "_read_yaml returns mappings only"
    return tree


def _read_yaml(path: Path) -> DictConfig:
    if path.is_dir():
        found = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".yaml", ".yml"))
        named = f"name a file in it, as {path / found[0]}" if found else "it holds no .yaml file; `oppo config --init` writes one"
        raise ConfigError(f"{path} is a folder, and a configuration is a file; {named}")
    if not path.is_file():
        raise ConfigError(missing_path("the configuration file", path))
    try:
        if problem := _reference_problem(check_yaml(path.read_text(encoding="utf-8"))):
            raise ConfigError(f"{path}: {problem}")
        tree = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        remedy = next((remedy for words, remedy in REMEDIES.items() if words in what), "correct the syntax there")
        raise ConfigError(f"{where}: not valid YAML ({what}); {remedy}") from error
    except DataError as error:  # of the text's size or depth
        raise ConfigError(f"{path}: {error}") from error
    except UnicodeError as error:
        encoding = "UTF-16" if path.read_bytes()[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"
        command = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > utf8.yaml"
        raise ConfigError(f"{path}: its text is not UTF-8 ({error}); save it as UTF-8: {command}") from error
    except (yaml.YAMLError, ValueError, AttributeError, TypeError) as error:  # the latter of tags such as `!!int x`
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path}: not a readable YAML text ({reason}); save it as UTF-8 YAML") from error
    except OSError as error:
        if error.errno is not None:
            raise ConfigError(f"{path} cannot be read ({error.strerror}); give this user the right to read it") from error
        raise ConfigError(f"{path} is not a YAML mapping ({error}); write `key: value`, a space after each colon") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}; correct the reference there") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} holds a list; a configuration is a mapping of `key: value` lines")
    return tree


def _reference_problem(values: Collection[str]) -> str | None:
    """Reason not to resolve `${...}` (omegaconf recurses for each), if any."""
    if len(values) > MOST_REFERENCES:
        return f"it has {len(values)} different references `${{...}}`, more than {MOST_REFERENCES}; write some of them out"
    steps = {bracket: 1 for bracket in "[{("} | {bracket: -1 for bracket in "]})"}
    deepest = max((level for text in values for level in accumulate(steps.get(each, 0) for each in text)), default=0)
    if deepest > DEEPEST_REFERENCE:
        return f"a reference `${{...}}` is nested {deepest} brackets deep, more than {DEEPEST_REFERENCE}; write it out"
    return None


def _without_removed(kind: type[Section], tree: DictConfig, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Take out keys that an override makes null though they cannot be."""
    nulls = [override for override in overrides if re.fullmatch(r"[^=]+=\s*(null|~)\s*", override, re.IGNORECASE)]
    removed, container = [], OmegaConf.to_container(tree)
    for override in nulls:
        *section, key = override.partition("=")[0].split(".")
        place: Any = container
        for part in section:
            place = place.get(part) if isinstance(place, dict) else _item(place, part)
        is_there = isinstance(place, dict) and key in place
        if (known := takes_null(kind, [*section, key])) or (known is None and not is_there):
            continue
        removed.append(override)
        if is_there:
            del place[key]
    assert isinstance(container, dict), "_read_yaml returns mappings only"
    return OmegaConf.create(container), [override for override in overrides if override not in removed]


def _item(place: Any, part: str) -> Any:
    return place[int(part)] if isinstance(place, list) and part.isdigit() and int(part) < len(place) else None


def _apply_overrides(tree: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Change `tree`; return the overrides' faults."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(f"override `{override}` is not of the form a.b=c; write the dotted key, `=`, then the value")
            continue
        try:
            if re.sub(r"[^.[]", "", key)[DEEPEST_YAML:]:
                raise ValueError(f"more than {DEEPEST_YAML} sections within each other")
            if problem := _reference_problem(check_yaml(text)):
                raise ValueError(problem)
            container: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
            OmegaConf.update(tree, key, container["value"])
        except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            problems.append(f"override `{override}` cannot be applied ({reason}); give an existing key and a YAML value")
    return problems


def _misses(problem: str, path: Sequence[str | int]) -> bool:
    """True if a problem only says that the key at `path`, left out because it is wrong, is missing."""
    *section, key = map(str, path or [""])
    return problem.startswith(f"{'.'.join(section)} ") and key in re.findall(r"\w+", problem)


def _without_wrong_keys(kind: type[SectionT], data: Any, wrong: Sequence[Sequence[str | int]]) -> SectionT | None:
    """Build without keys at `wrong` paths; None if one is required."""
    for path in wrong:
        place = data
        with suppress(KeyError, TypeError):  # a key that a preset's file brought is not in the data
            for part in path[:-1]:
                place = place[part]
            if isinstance(place, dict) and path:
                place.pop(path[-1], None)
    try:
        return kind.model_validate(data)
    except ValidationError:
        return None


def _plain(value: Any) -> Any:
    """Plain YAML values; `${` is escaped, being resolved already."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (Path, date)):
        value = str(value)
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
