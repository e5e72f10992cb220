"""The cases that `oppo init` knows, and the texts of their files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

_PLACE = re.compile(r"@(?:path:(?P<path>[^@]+)|(?P<name>actor|reward|data|heldout))@")
_LINE_WITH_PLACE = re.compile(r"^(.*?@[a-z].*?)(?: +(#.*))?$", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./~+-]*")

COMMENTS_AT = 33
"""The column of the templates' comments."""


@dataclass(frozen=True)
class Case:
    """A starting point.

    `files` are written into the configuration's folder, the configuration is made from `template`; `paths` are the paths that
    the user may name, with their defaults in that folder; `commands` are the next commands, `{config}` for its path,
    `{here}` for its folder and a slash, the name of a path for that; `made` are the paths in that folder that they make.
    """

    name: str
    about: str
    kind: str
    template: str
    paths: Mapping[str, str]
    commands: tuple[str, ...]
    files: Mapping[str, str]
    makes_data: bool = False
    preset: str = "ppo"
    made: tuple[str, ...] = ()

    @property
    def config(self) -> Path:
        """Default path of the configuration file."""
        return Path(f"{self.preset if self.kind == 'train' else self.kind}.yaml")

    def texts(self, config: Path, paths: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
        """Return each file to write and its text, the configuration first; `paths` replace the default paths of the case."""
        sources = {config: self.template} | {config.parent / name: source for name, source in self.files.items()}
        beside = {name: str(config.parent / path) for name, path in self.paths.items()}
        for target, source in sources.items():
            yield target, _filled(packaged(source), config.parent, {**beside, **paths})


def packaged(name: str) -> str:
    """Return the text of a template."""
    return (files(__package__) / "files" / name).read_text(encoding="utf-8")


def _filled(text: str, here: Path, paths: Mapping[str, str]) -> str:
    """Replace `@path:X@` by X below the configuration's folder and `@actor@` by the user's actor."""

    def value(place: re.Match[str]) -> str:
        return _scalar(str(here / place["path"]) if place["path"] else paths[place["name"]])

    def line(match: re.Match[str]) -> str:
        filled = _PLACE.sub(value, match[1])
        return filled if match[2] is None else f"{filled:<{COMMENTS_AT - 2}}  {match[2]}"

    return _LINE_WITH_PLACE.sub(line, text)


def _scalar(path: str) -> str:
    """Return a path as a YAML scalar that is also valid within braces; `${` (a reference) is escaped."""
    return path if _PLAIN.fullmatch(path) else json.dumps(path.replace("${", r"\${"), ensure_ascii=False)


_ACTOR = {"actor": "models/actor"}
_GSM8K = {"data": "gsm8k_train.jsonl", "heldout": "gsm8k_test.jsonl"}
_HH = {"data": "train.jsonl", "heldout": "heldout.jsonl"}
_TRAIN = ("oppo validate {config}", "oppo train {config} --dry-run", "oppo train {config}")
_HH_TOKENIZER = "oppo tokenizer {data} --out {here}tokenizer.model --vocab-size 2048"
CASES = {
    case.name: case
    for case in (
        Case(
            "gsm8k", "PPO of a Hugging Face actor on GSM8K, rewarded by a verifier", "train", "gsm8k.yaml",
            {**_ACTOR, **_GSM8K}, _TRAIN, {},
        ),
        Case(
            "grpo", "GRPO of a Hugging Face actor on GSM8K, rewarded by a verifier", "train", "grpo.yaml",
            {**_ACTOR, **_GSM8K}, _TRAIN, {}, preset="grpo",
        ),
        Case(
            "dapo", "DAPO of a Hugging Face actor on GSM8K, rewarded by a verifier", "train", "dapo.yaml",
            {**_ACTOR, **_GSM8K}, _TRAIN, {}, preset="dapo",
        ),
        Case(
            "reward-model", "PPO of a Hugging Face actor against a reward model", "train", "reward-model.yaml",
            {**_ACTOR, "reward": "models/reward", "data": "prompts.jsonl"}, _TRAIN, {},
        ),
        Case(
            "hf-actor", "PPO of a Hugging Face actor, your prompts, your reward function", "train", "hf-actor.yaml",
            {**_ACTOR, "data": "prompts.jsonl"}, ("export PYTHONPATH={here}", *_TRAIN), {"my_reward.py": "my_reward.py"},
        ),
        Case(
            "sft", "fine-tune a Hugging Face model: what a PPO actor starts from", "sft", "sft.yaml",
            {**_ACTOR, "data": "sft.jsonl"}, ("oppo validate {config}", "oppo sft {config}"), {},
        ),
        Case(
            "rm", "train a reward model on chosen/rejected pairs", "rm", "rm.yaml",
            {**_ACTOR, "data": "pairs.jsonl"}, ("oppo validate {config}", "oppo rm {config}"), {},
        ),
        Case(
            "prm", "train a process reward model on steps with labels", "prm", "prm.yaml",
            {**_ACTOR, "data": "steps.jsonl"}, ("oppo validate {config}", "oppo prm {config}"), {},
        ),
        Case(
            "dpo", "train an actor on chosen/rejected pairs, without a reward model", "dpo", "dpo.yaml",
            {**_ACTOR, "data": "pairs.jsonl"}, ("oppo validate {config}", "oppo dpo {config}"), {},
        ),
        Case(
            "kto", "train an actor on wanted and unwanted completions", "kto", "kto.yaml",
            {**_ACTOR, "data": "rows.jsonl"}, ("oppo validate {config}", "oppo kto {config}"), {},
        ),
        Case(
            "arithmetic", "the whole chain on two CPU cores, with data that is generated here", "train", "arithmetic.yaml",
            {},
            (
                "oppo tokenizer {here}data/sft.jsonl --out {here}tokenizer.model --vocab-size 284",
                "oppo sft {here}sft.yaml", *_TRAIN,
            ),
            {"sft.yaml": "arithmetic-sft.yaml"}, makes_data=True, made=("tokenizer.model", "runs/sft/weights"),
        ),
        Case(
            "hh", "from HH's pairs to SFT, a reward model and PPO against it, on two CPU cores", "train", "hh.yaml",
            _HH,
            (
                _HH_TOKENIZER,
                "oppo sft {here}sft.yaml", "oppo rm {here}rm.yaml", *_TRAIN,
            ),
            {"sft.yaml": "hh-sft.yaml", "rm.yaml": "hh-rm.yaml"},
            made=("runs/sft/weights", "runs/rm/weights"),
        ),
        Case(
            "hh-dpo", "from HH's pairs to SFT and DPO, on two CPU cores", "dpo", "hh-dpo.yaml", _HH,
            (_HH_TOKENIZER, "oppo sft {here}sft.yaml", "oppo validate {config}", "oppo dpo {config}"),
            {"sft.yaml": "hh-sft.yaml"}, made=("runs/sft/weights",),
        ),
        Case(
            "hh-kto", "from HH's pairs to SFT and KTO, on two CPU cores", "kto", "hh-kto.yaml", _HH,
            (_HH_TOKENIZER, "oppo sft {here}sft.yaml", "oppo validate {config}", "oppo kto {config}"),
            {"sft.yaml": "hh-sft.yaml"}, made=("runs/sft/weights",),
        ),
    )
}  # fmt: skip
