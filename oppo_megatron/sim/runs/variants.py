"""The runs of a sweep: every mode with every value of every setting that is swept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from oppo_megatron.config.modes import MODES
from oppo_megatron.errors import ConfigError

MOST = 1000
PADDED = "padded"
"""A mode of simulated runs alone: `sequential`, every sequence of a batch computed as long as its longest (`padding.py`)."""
PLAYED_MODES = (*MODES, PADDED)


@dataclass(frozen=True)
class Variant:
    """One run: the configuration in `mode` (None: as it is), with `overrides`."""

    mode: str | None
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """For tables and pictures."""
        return " ".join([*([self.mode] if self.mode else []), *self.overrides]) or "as configured"

    @property
    def folder(self) -> str:
        """The name as that of a directory."""
        return re.sub(r"[^A-Za-z0-9.=+_-]+", "_", self.name)


def variants(modes: str | None, sweeps: Sequence[str]) -> list[Variant]:
    """`modes` and the values of each of `sweeps` ("a.b=1,2") are separated by commas.  Raises ConfigError."""
    names = [None] if modes is None else [name.strip() for name in modes.split(",")]
    unknown = [name for name in names if name is not None and name not in PLAYED_MODES]
    problems = [f"--modes {name}: no such mode; there are {', '.join(PLAYED_MODES)}" for name in unknown]
    axes = []
    for sweep in sweeps:
        key, _, values = sweep.partition("=")
        found = [f"{key.strip()}={value}" for value in _values(values)]
        if not key.strip() or not found:
            problems.append(f"--sweep {sweep}: give a setting and its values, as in overlap.delta.initial=0,4,8")
        axes.append(found)
    settings = [sweep.partition("=")[0].strip() for sweep in sweeps]
    twice = {each for each in settings if settings.count(each) > 1}
    problems += [f"--sweep {each}: swept twice; give all values at once" for each in sorted(twice)]
    made = [] if problems else [Variant(mode, values) for mode in names for values in product(*axes)]
    if len(made) > MOST:
        problems.append(f"{len(made)} runs are asked for; ask for {MOST} at most")
    if len({each.folder for each in made}) < len(made):
        problems.append("a mode or a value is given twice; give each once")
    if problems:
        raise ConfigError(problems)
    return made


def _values(text: str) -> list[str]:
    """Split at commas outside brackets, which lists have within them."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [value.strip() for value in found if value.strip()]
