"""`oppo config`: explains a setting, lists all settings, or prints a file with its defaults filled in."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_megatron.cli.parser import add_config_arguments

if TYPE_CHECKING:
    from oppo_megatron.config.base import Section
    from oppo_megatron.config.describe import Setting

KINDS = ("train", "sft", "rm", "prm", "dpo", "kto", "serve")
WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, nargs="?", help="print it resolved, or show its value of KEY")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--explain", metavar="KEY", help="meaning, values, unit and default of a key, as in overlap.delta"
    )
    what.add_argument("--list", action="store_true", help="every key, with its default and unit")
    parser.add_argument("--kind", choices=KINDS, help="the command it is for; default: by the file, else all")


def run(args: argparse.Namespace) -> int:
    from oppo_megatron.errors import ConfigError

    kinds = _kinds(args.kind, args.config)
    if args.list:
        print("\n".join(_listing(kinds)))
    elif args.explain is not None:
        here = _resolved(args) if args.config is not None else None
        print("\n".join(_explanation(kinds, args.explain, here)))
    elif args.config is not None:
        from oppo_megatron.config.load import config_yaml

        print(config_yaml(_resolved(args)), end="")
    else:
        raise ConfigError("`oppo config` has nothing to show; give CONFIG.yaml, --explain KEY or --list")
    return 0


def _kinds(kind: str | None, config: Path | None) -> Mapping[str, type[Section]]:
    """The schemas to look in, by the command they are for."""
    from oppo_megatron.cli.validate import guess_kind
    from oppo_megatron.config.describe import COMMANDS

    if kind is None and config is not None:
        kind = guess_kind(config)
    return COMMANDS if kind is None else {kind: COMMANDS[kind]}


def _resolved(args: argparse.Namespace) -> Section:
    """Return the file with every default filled in, for any machine: the files that it names need not exist."""
    from oppo_megatron.cli.validate import guess_kind
    from oppo_megatron.config.describe import COMMANDS
    from oppo_megatron.config.load import load_config

    return load_config(COMMANDS[args.kind or guess_kind(args.config)], args.config, args.overrides)


def _explanation(kinds: Mapping[str, type[Section]], key: str, here: Section | None) -> Iterator[str]:
    """Return the explanation of `key`, printed once for all commands that share it.

    Raises ConfigError with the nearest keys if no command has it.
    """
    from oppo_megatron.config.describe import find_setting, near_keys
    from oppo_megatron.errors import ConfigError

    found: dict[tuple[str, ...], list[str]] = {}
    for command, kind in kinds.items():
        setting = find_setting(kind, key)
        if setting is not None:
            found.setdefault((setting.key, *_described(setting, key, here)), []).append(f"oppo {command}")
    if not found:
        near = [f"`{each}`" for each in near_keys(dict(kinds), key)]
        raise ConfigError(
            f"`{key}` is not a setting; "
            + (f"did you mean {' or '.join(near)}?" if near else "`oppo config --list` shows all of them")
        )
    for number, ((name, *lines), commands) in enumerate(found.items()):
        yield from [""] * bool(number)
        yield f"{name}  ({', '.join(commands)})"
        yield from lines


def _described(setting: Setting, key: str, here: Section | None) -> Iterator[str]:
    from oppo_megatron.config.describe import about, settings_in

    rows = {
        "value": setting.values(lambda section: "section"),
        "unit": "pure number" if setting.unit == "" else setting.unit,
        "default": "as its keys have it" if setting.default == "as listed there" else setting.default,
        "here": None if here is None else _shown(here, key),
    }
    yield from textwrap.wrap(setting.meaning, WIDTH, initial_indent="  ", subsequent_indent="  ")
    for name, value in rows.items():
        if value is not None:
            yield f"  {name + ':':<9}{value}"
    if setting.table:
        widths = [max(map(len, column)) for column in zip(*setting.table, strict=True)]
        for row in setting.table:
            yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if setting.section is not None:
        more = about(setting.section).partition("\n\n")[2]
        yield from (f"  {line}".rstrip() for line in more.splitlines())
        yield "  its keys:"
        prefix = setting.key + ("[]." if setting.is_list else ".")
        yield from _aligned(settings_in(setting.section, prefix))


def _shown(config: Section, key: str) -> str:
    """Return the value at `key` in a configuration as YAML on one line; for a list of sections without an index, one value
    per section."""
    import yaml

    value: Any = config.model_dump(mode="json")
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, list) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
        elif isinstance(value, list):
            value = [_at(item, part) for item in value]
        else:
            value = _at(value, part)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def _at(value: Any, part: str) -> Any:
    """Return `value` itself if it is not a mapping, as for a section that is null."""
    return value.get(part) if isinstance(value, dict) and part else value


def _listing(kinds: Mapping[str, type[Section]]) -> Iterator[str]:
    from oppo_megatron.config.describe import all_settings

    for number, (command, kind) in enumerate(kinds.items()):
        yield from [""] * bool(number)
        yield f"oppo {command}:"
        yield from _aligned(setting for setting in all_settings(kind) if setting.section is None)


def _aligned(settings: Iterator[Setting]) -> Iterator[str]:
    """Return one line per key: default, unit, and as much of its meaning as fits."""
    for setting in settings:
        unit = f" {setting.unit}" if setting.unit and setting.default not in ("required", "null") else ""
        default = "section" if setting.default == "as listed there" else setting.default + unit
        start = f"  {setting.key:<36} {default:<20} "
        yield start + textwrap.shorten(setting.meaning, max(WIDTH - len(start), 40), placeholder=" ...")
