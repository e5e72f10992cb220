"""`oppo config`: explain a setting, list settings, print a file with its defaults, or write a starting file."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from oppo_megatron.cli import init
from oppo_megatron.cli.load import guess_kind
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.config.base import Section
from oppo_megatron.config.describe import COMMANDS, Setting, about, all_settings, find_setting, near_keys, settings_in
from oppo_megatron.config.load import config_yaml, load_config
from oppo_megatron.errors import ConfigError

WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, nargs="?", help="print it resolved, or show its value of KEY")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--explain", metavar="KEY", help="meaning, values, unit and default of a key, as in overlap.delta")
    what.add_argument("--list", action="store_true", help="every key, with its default and unit")
    what.add_argument(
        "--init", nargs="?", const="", metavar="CASE", help="write a configuration to start from; without CASE, list the cases"
    )
    parser.add_argument("--kind", choices=COMMANDS, help="the command it is for; default: by the file, else all")
    init.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.init is not None:
        if args.config is not None:
            raise ConfigError(f"{args.config}: --init writes a new file; name it with --out, or drop --init")
        return init.run(args)
    if unused := [f"--{name}" for name in (*init.PATHS, "out", "force") if getattr(args, name)]:
        raise ConfigError(f"{' and '.join(unused)} can only be given with --init; add it, or drop them")
    kind = args.kind or (None if args.config is None else guess_kind(args.config))
    kinds: Mapping[str, type[Section]] = COMMANDS if kind is None else {kind: COMMANDS[kind]}
    config = None
    if kind is not None and args.config is not None and not args.list:
        config = load_config(COMMANDS[kind], args.config, args.overrides)  # the files that it names need not exist
    if args.list:
        for number, (command, each) in enumerate(kinds.items()):
            lines = _aligned(setting for setting in all_settings(each) if setting.section is None)
            print(*[""] * bool(number), f"oppo {command}:", *lines, sep="\n")
    elif args.explain is not None:
        print("\n".join(_explanation(kinds, args.explain, config)))
    elif config is not None:
        print(config_yaml(config), end="")
    else:
        raise ConfigError("`oppo config` has nothing to show; give CONFIG.yaml, --explain KEY, --list or --init")
    return 0


def _explanation(kinds: Mapping[str, type[Section]], key: str, here: Section | None) -> Iterator[str]:
    """Yield the explanation of `key`, once for commands that share it, with its value in `here`. Raises ConfigError."""
    found: dict[tuple[str, ...], list[str]] = {}
    for command, kind in kinds.items():
        setting = find_setting(kind, key)
        if setting is not None:
            found.setdefault((setting.key, *_described(setting, key, here)), []).append(f"oppo {command}")
    if not found:
        near = [f"`{each}`" for each in near_keys(dict(kinds), key)]
        remedy = f"did you mean {' or '.join(near)}?" if near else "`oppo config --list` shows all of them"
        raise ConfigError(f"`{key}` is not a setting; {remedy}")
    for number, ((name, *lines), commands) in enumerate(found.items()):
        yield from [""] * bool(number)
        yield f"{name}  ({', '.join(commands)})"
        yield from lines


def _described(setting: Setting, key: str, here: Section | None) -> Iterator[str]:
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
    """The value at `key` as a line of YAML; one value per section for a list without index."""

    def at(value: Any, part: str) -> Any:
        return value.get(part) if isinstance(value, dict) and part else value  # a section may be null

    value: Any = config.model_dump(mode="json")
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, list) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = [at(item, part) for item in value] if isinstance(value, list) else at(value, part)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def _aligned(settings: Iterator[Setting]) -> Iterator[str]:
    """Yield a line per key: default, unit, and as much of the meaning as fits."""
    for setting in settings:
        unit = f" {setting.unit}" if setting.unit and setting.default not in ("required", "null") else ""
        default = "section" if setting.default == "as listed there" else setting.default + unit
        start = f"  {setting.key:<36} {default:<20} "
        yield start + textwrap.shorten(setting.meaning, max(WIDTH - len(start), 40), placeholder=" ...")
