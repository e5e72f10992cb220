"""Print the page of all settings, which the site shows: `python tools/reference.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oppo_megatron.config.aligner import AlignerConfig
from oppo_megatron.config.base import Section
from oppo_megatron.config.describe import COMMANDS, LISTED, Setting, about, settings_in

INTRODUCTION = """\
# Configuration

All settings of `oppo train`, `oppo sft`, `oppo rm`, `oppo dpo` and `oppo serve`, and of the block `oppo:` for
[the NeMo-Aligner plugin](nemo_aligner.md). The page is generated from the schema in `oppo_megatron/config/`.

A configuration is a YAML file. Settings on the command line, after the file's name, replace the file's settings:

    oppo train ppo.yaml rollout.batch_size=64 overlap.delta.rule=fixed

The right side is YAML too (`data.path=[a.jsonl,b.jsonl]`, `reference=null`). `null` takes a key out that cannot be
null, and it has its default again: `ppo.kl=null`. `${...}` in the file is resolved by OmegaConf: `${actor.init}`
repeats another setting, `${oc.env:NAME,default}` reads the environment. An unknown key is an error that names the
nearest known one. Relative paths start at the current directory. `oppo validate FILE` checks a file, `--dry-run` prints
it with every default filled in, and each run keeps that as `config.yaml`. `oppo config --explain KEY` prints this
page's entry for a key.

The column *unit* gives the unit of a number; 1 marks a pure number. A MiB is 2^20 bytes.
"""
PAGES: dict[str, type[Section]] = {
    "`oppo train`": COMMANDS["train"],
    "`oppo sft` and `oppo rm`": COMMANDS["rm"],
    "`oppo dpo`": COMMANDS["dpo"],
    "`oppo serve`": COMMANDS["serve"],
    "`trainer.ppo.oppo` of NeMo-Aligner": AlignerConfig,
}
"""The configurations with a table of their own; `oppo sft` has the settings of `oppo rm` but `separator`."""


def render_reference() -> str:
    parts = [INTRODUCTION]
    for title, kind in PAGES.items():
        parts.append(f"## {title}\n\n{_table(kind)}")
    parts.append("## Sections\n")
    for section, places in _sections().items():
        where = ", ".join(f"`{place}`" for place in places)
        parts.append(f"### {_title(section)}\n\nAt {where}.\n\n{about(section)}\n\n{_table(section)}")
    return "\n".join(parts)


def _sections() -> dict[type[Section], list[str]]:
    """Each section class in the order of its first use, with the dotted keys that hold it."""
    places: dict[type[Section], list[str]] = {}
    for kind in PAGES.values():
        for place, section in _nested(kind, ""):
            known = places.setdefault(section, [])
            if place not in known:
                known.append(place)
    return places


def _nested(kind: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for setting in settings_in(kind, prefix):
        if setting.section is not None:
            place = setting.key + ("[]" if setting.is_list else "")
            yield place, setting.section
            yield from _nested(setting.section, place + ".")


def _table(section: type[Section]) -> str:
    lines = ["| setting | value | unit | default | meaning |", "|---|---|---|---|---|"]
    for setting in settings_in(section):
        cells = (f"`{setting.name}`", setting.values(_link), _unit(setting), _default(setting), setting.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _link(section: type[Section]) -> str:
    title = _title(section)
    return f"[{title}](#{title.lower().replace(' ', '-')})"


def _unit(setting: Setting) -> str:
    return {"": "1", None: ""}.get(setting.unit, setting.unit or "")


def _default(setting: Setting) -> str:
    return setting.default if setting.default in ("required", LISTED) else f"`{setting.default}`"


def _title(section: type[Section]) -> str:
    """`TrainedRoleConfig` -> `Trained role`, `KLConfig` -> `KL`, `PlacementSettings` -> `Placement`."""
    name = section.__name__.removesuffix("Config").removesuffix("Settings")
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", name)
    return " ".join(word if word.isupper() or not index else word.lower() for index, word in enumerate(words))


if __name__ == "__main__":
    print(render_reference(), end="")
