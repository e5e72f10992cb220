"""`oppo config --init CASE`: write a starting configuration and the files it needs, and print the next commands."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from oppo_megatron.config.describe import COMMANDS
from oppo_megatron.config.load import load_config
from oppo_megatron.config.paths import named_paths
from oppo_megatron.data.generated import DatasetSizes, Shape, misreported_solution, write_dataset
from oppo_megatron.errors import ConfigError

PATHS = {
    "actor": "Hugging Face directory of the model to train",
    "reward": "Hugging Face directory of the reward model",
    "data": "JSONL file of rows",
    "heldout": "JSONL file of rows that are not trained on",
}
SUFFIXES = (".yaml", ".yml")
PROBLEMS = {"sft": 14400, "pairs": 2000, "prompts": 4000, "heldout": 200}
"""Rows of each generated file."""
COMMENTS_AT = 33
"""Column of the templates' comments."""
_PLACE = re.compile(r"@(?:path:(?P<path>[^@]+)|(?P<name>actor|reward|data|heldout))@")
_LINE_WITH_PLACE = re.compile(r"^(.*?@[a-z].*?)(?: +(#.*))?$", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./~+-]*")


@dataclass(frozen=True)
class Case:
    """A template NAME.yaml.

    `paths`: what the user may name, with defaults; `files`: further files with their templates; `before`: commands before `oppo
    {kind}` (`{here}`: the folder with a slash, or a path's name); `made`: paths that they make.
    """

    name: str
    about: str
    kind: str
    paths: Mapping[str, str]
    before: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    made: tuple[str, ...] = ()
    makes_data: bool = False
    preset: str = "ppo"

    @property
    def config(self) -> Path:
        return Path(f"{self.preset if self.kind == 'train' else self.name.removeprefix('hh-')}.yaml")

    @property
    def commands(self) -> tuple[str, ...]:
        plan = ("oppo train {config} --dry-run",) if self.kind == "train" else ()
        return (*self.before, "oppo validate {config}", *plan, f"oppo {self.kind} {{config}}")

    def texts(self, config: Path, paths: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
        """Yield each file to write with its text, the configuration first."""
        sources = {config: f"{self.name}.yaml"} | {config.parent / name: source for name, source in self.files.items()}
        defaults = {name: str(config.parent / path) for name, path in self.paths.items()}
        for target, source in sources.items():
            text = (files(__package__) / "files" / source).read_text(encoding="utf-8")
            yield target, _filled(text, config.parent, {**defaults, **paths})


def _filled(text: str, here: Path, paths: Mapping[str, str]) -> str:
    """Replace `@path:X@` by X in the configuration's folder, and `@actor@` by the user's actor."""

    def value(place: re.Match[str]) -> str:
        """A YAML scalar that is also valid in braces, with `${` (a reference) escaped."""
        path = str(here / place["path"]) if place["path"] else paths[place["name"]]
        return path if _PLAIN.fullmatch(path) else json.dumps(path.replace("${", r"\${"), ensure_ascii=False)

    def line(match: re.Match[str]) -> str:
        filled = _PLACE.sub(value, match[1])
        return filled if match[2] is None else f"{filled:<{COMMENTS_AT - 2}}  {match[2]}"

    return _LINE_WITH_PLACE.sub(line, text)


_ACTOR = {"actor": "models/actor"}
_GSM8K = {**_ACTOR, "data": "gsm8k_train.jsonl", "heldout": "gsm8k_test.jsonl"}
_HH = {"data": "train.jsonl", "heldout": "heldout.jsonl"}
_HH_SFT = ("oppo data tokenizer {data} --out {here}tokenizer.model --vocab-size 2048", "oppo sft {here}sft.yaml")
_SFT = ("runs/sft/weights",)
CASES = {
    case.name: case
    for case in (
        Case("gsm8k", "PPO of a Hugging Face actor on GSM8K, rewarded by a verifier", "train", _GSM8K),
        Case("grpo", "GRPO of a Hugging Face actor on GSM8K, rewarded by a verifier", "train", _GSM8K, preset="grpo"),
        Case("dapo", "DAPO of a Hugging Face actor on GSM8K, rewarded by a verifier", "train", _GSM8K, preset="dapo"),
        Case(
            "reward-model", "PPO of a Hugging Face actor against a reward model", "train",
            {**_ACTOR, "reward": "models/reward", "data": "prompts.jsonl"},
        ),
        Case(
            "hf-actor", "PPO of a Hugging Face actor, your prompts, your reward function", "train",
            {**_ACTOR, "data": "prompts.jsonl"}, ("export PYTHONPATH={here}",), {"my_reward.py": "my_reward.py"},
        ),
        Case("sft", "fine-tune a Hugging Face model: what a PPO actor starts from", "sft", {**_ACTOR, "data": "sft.jsonl"}),
        Case("rm", "train a reward model on chosen/rejected pairs", "rm", {**_ACTOR, "data": "pairs.jsonl"}),
        Case("prm", "train a process reward model on steps with labels", "rm", {**_ACTOR, "data": "steps.jsonl"}),
        Case(
            "dpo", "train an actor on chosen/rejected pairs, without a reward model", "dpo", {**_ACTOR, "data": "pairs.jsonl"},
        ),
        Case("kto", "train an actor on wanted and unwanted completions", "dpo", {**_ACTOR, "data": "rows.jsonl"}),
        Case(
            "arithmetic", "the whole chain on two CPU cores, with data that is generated here", "train", {},
            ("oppo data tokenizer {here}data/sft.jsonl --out {here}tokenizer.model --vocab-size 284", "oppo sft {here}sft.yaml"),
            {"sft.yaml": "arithmetic-sft.yaml"}, ("tokenizer.model", *_SFT), makes_data=True,
        ),
        Case(
            "hh", "from HH's pairs to SFT, a reward model and PPO against it, on two CPU cores", "train", _HH,
            (*_HH_SFT, "oppo rm {here}rm.yaml"), {"sft.yaml": "hh-sft.yaml", "rm.yaml": "hh-rm.yaml"},
            (*_SFT, "runs/rm/weights"),
        ),
        Case(
            "hh-dpo", "from HH's pairs to SFT and DPO, on two CPU cores", "dpo", _HH, _HH_SFT,
            {"sft.yaml": "hh-sft.yaml"}, _SFT,
        ),
        Case(
            "hh-kto", "from HH's pairs to SFT and KTO, on two CPU cores", "dpo", _HH, _HH_SFT,
            {"sft.yaml": "hh-sft.yaml"}, _SFT,
        ),
    )
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--init")
    group.add_argument("--out", type=Path, metavar="FILE.yaml", help="default: ppo.yaml, sft.yaml, ..., by what it is for")
    for name, about in PATHS.items():
        group.add_argument(f"--{name}", metavar="PATH", help=about)
    group.add_argument("--force", action="store_true", help="overwrite files that are there")


def run(args: argparse.Namespace) -> int:
    if not args.init:
        for case in CASES.values():
            options = " ".join(f"--{name}" for name in case.paths)
            print(f"  {case.name:<14} {case.about}" + (f" ({options})" if options else ""))
        return 0
    if args.init not in CASES:
        near = difflib.get_close_matches(args.init, CASES, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else f"choose one of {', '.join(CASES)}"
        raise ConfigError(f"`{args.init}` is not a case; {remedy}")
    case = CASES[args.init]
    given = {name: value for name in PATHS if (value := getattr(args, name)) is not None}
    if wrong := [f"--{name}" for name in given if name not in case.paths]:
        takes = ", ".join(f"--{name}" for name in case.paths) or "none of these"
        raise ConfigError(f"{' and '.join(wrong)}: case `{case.name}` has no place for it; it takes {takes}")
    config = args.out or case.config
    _write(case, config, given, args.force)
    print("\n".join(_summary(case, config, given)))
    return 0


def _write(case: Case, config: Path, given: Mapping[str, str], force: bool) -> None:
    """Write all files of the case, or none: raises ConfigError if one exists and `force` is not set."""
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
        shape = Shape(max_operations=16, max_operand=5, largest=15)
        sizes = DatasetSizes(**PROBLEMS)
        write_dataset(config.parent / "data", 1, sizes, imperfect=0.6, flaw=misreported_solution, shape=shape)


def _summary(case: Case, config: Path, given: Mapping[str, str]) -> Iterator[str]:
    here = config.parent
    yield f"{config}: {case.about}"
    for name in [*case.files, *(["data"] if case.makes_data else [])]:
        yield f"{here / name}{'' if name in case.files else '/'}: written next to it"
    made, missing = {here / path for path in case.made}, dict[Path, list[str]]()
    for key, path in named_paths(load_config(COMMANDS[case.kind], config)):
        if key != "run_dir" and path not in made and not path.exists():  # nor does a next command make it
            missing.setdefault(path, []).append(key)
    if missing:
        yield "yet to supply:"
        yield from (f"  {path}  ({', '.join(keys)})" for path, keys in missing.items())
    yield "next:"
    paths = {name: shlex.quote(given.get(name, str(here / path))) for name, path in case.paths.items()}
    for command in case.commands:
        prefix = "" if here == Path(".") else f"{here}/"
        if command.startswith("export "):
            prefix = prefix or "."
        quoted = shlex.quote(prefix) if prefix else ""
        yield "  " + command.format(config=shlex.quote(str(config)), here=quoted, **paths)
