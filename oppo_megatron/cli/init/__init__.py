"""`oppo init`: write a configuration to start from and the files that it needs, and print the next commands."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from oppo_megatron.cli.init.cases import Case

OPTIONS = {
    "actor": "Hugging Face directory of the model to train",
    "reward": "Hugging Face directory of the reward model",
    "data": "JSONL file of rows",
    "heldout": "JSONL file of rows that are not trained on",
}
SUFFIXES = (".yaml", ".yml")
PROBLEMS = {"sft": 14400, "pairs": 2000, "prompts": 4000, "heldout": 200}
"""Rows of each generated file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", nargs="?", metavar="CASE", help="what to start from; --list shows the cases")
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.yaml", help="default: ppo.yaml, sft.yaml, ..., by what it is for"
    )
    for name, about in OPTIONS.items():
        parser.add_argument(f"--{name}", metavar="PATH", help=about)
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")


def run(args: argparse.Namespace) -> int:
    if args.list:
        print("\n".join(_list()))
        return 0
    case = _chosen(args.case)
    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    if wrong := [f"--{name}" for name in given if name not in case.paths]:
        takes = ", ".join(f"--{name}" for name in case.paths) or "none of these"
        raise ConfigError(f"{' and '.join(wrong)}: case `{case.name}` has no place for it; it takes {takes}")
    config = args.out or case.config
    _write(case, config, given, args.force)
    print("\n".join(_summary(case, config, given)))
    return 0


def _list() -> Iterator[str]:
    from oppo_megatron.cli.init.cases import CASES

    for case in CASES.values():
        options = " ".join(f"--{name}" for name in case.paths)
        yield f"  {case.name:<14} {case.about}" + (f" ({options})" if options else "")


def _chosen(name: str | None) -> Case:
    import difflib

    from oppo_megatron.cli.init.cases import CASES

    if name is None:
        raise ConfigError(
            f"no case was given; choose one of {', '.join(CASES)} (`oppo init --list` says what they are)"
        )
    if name not in CASES:
        near = difflib.get_close_matches(name, CASES, n=1)
        raise ConfigError(
            f"`{name}` is not a case; "
            + (f"did you mean `{near[0]}`?" if near else f"choose one of {', '.join(CASES)}")
        )
    return CASES[name]


def _write(case: Case, config: Path, given: Mapping[str, str], force: bool) -> None:
    """Write the files of the case, or none of them: raises ConfigError if one exists and `force` is not given."""
    if config.suffix not in SUFFIXES:
        raise ConfigError(f"--out is `{config}`, but a configuration ends in .yaml; name a file, as in --out ppo.yaml")
    texts = dict(case.texts(config, given))
    data = [config.parent / "data" / f"{name}.jsonl" for name in PROBLEMS if case.makes_data]
    if there := [str(path) for path in (*texts, *data) if path.exists() or path.is_symlink()]:
        folders = [path for path in there if Path(path).is_dir()]
        if folders or not force:
            remedy = "name another with --out" if folders else "--force overwrites, --out names another file"
            raise ConfigError(f"{', '.join(folders or there)} is there already; {remedy}")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if case.makes_data:
        from oppo_megatron.data.arithmetic import DatasetSizes, Shape, misreported_solution, write_dataset

        shape = Shape(max_operations=16, max_operand=5, largest=15)
        sizes = DatasetSizes(**PROBLEMS)
        write_dataset(config.parent / "data", 1, sizes, imperfect=0.6, flaw=misreported_solution, shape=shape)


def _summary(case: Case, config: Path, given: Mapping[str, str]) -> Iterator[str]:
    """Yield the written files, the inputs that the user must supply, and the next commands."""
    yield f"{config}: {case.about}"
    beside = [*case.files, *(["data/"] if case.makes_data else [])]
    yield from (f"{config.parent / name}{'/' * name.endswith('/')}: written beside it" for name in beside)
    if missing := _missing(case, config):
        yield "yet to supply:"
        for path, keys in missing.items():
            yield f"  {path}  ({', '.join(keys)})"
    yield "next:"
    here = config.parent
    paths = {name: shlex.quote(given.get(name, str(here / path))) for name, path in case.paths.items()}
    for command in case.commands:
        prefix = "" if here == Path(".") else f"{here}/"
        if command.startswith("export "):
            prefix = prefix or "."
        quoted = shlex.quote(prefix) if prefix else ""
        yield "  " + command.format(config=shlex.quote(str(config)), here=quoted, **paths)


def _missing(case: Case, config: Path) -> dict[Path, list[str]]:
    """Return the files and folders, with their keys, that the configuration names, that do not exist, and that no next
    command makes."""
    from oppo_megatron.config.describe import COMMANDS
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.paths import named_paths

    made = {config.parent / path for path in case.made}
    missing: dict[Path, list[str]] = {}
    for key, path in named_paths(load_config(COMMANDS[case.kind], config)):
        if key != "run_dir" and path not in made and not path.exists():
            missing.setdefault(path, []).append(key)
    return missing
