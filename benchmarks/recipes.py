"""Plan the recipes of `examples/recipes` and write layouts and expected figures into them and into their table.

    python -m benchmarks.recipes [NAME ...]     # default: all, some minutes each

A recipe's comment names its cluster and lengths.  Models are read as shapes (`examples/planner/*.json`), so none has weights.
`oppo plan search` chooses ranks, layouts, micro-batches, chunk and delta of `oppo train`.  Recipes of `oppo rm` and `oppo dpo`
keep their layout; their memory is counted as by `--dry-run`.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from oppo_megatron.cli.main import main as oppo
from oppo_megatron.config.describe import COMMANDS
from oppo_megatron.config.load import load_config, read_tree
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.layout.role_memory import planned_memory
from oppo_megatron.sim.clusters.reading import read_cluster

FOLDER = Path("examples/recipes")
SHAPES = Path("examples/planner")
PAGE = FOLDER / "README.md"
MODELS = ("actor", "critic", "reference", "reward", "model")
LAYOUT = ("parallel", "ranks", "train")
SAME = "${actor.checkpoint}"
WIDTH = 120
_SEARCHED = re.compile(r"# Layout: oppo plan search \S+ (?P<options>.*)")
_BY_HAND = re.compile(r"# Layout: by hand, for (?P<cluster>\S+)")
_EXPECTED = re.compile(
    r"# Expected: (?:(?P<seconds>[\d.]+) s per step, )?(?P<gb>[\d.]+) of (?P<of>[\d.]+) GB on the fullest GPU \(predicted\)"
)


class _Dumper(yaml.SafeDumper):
    """Puts mappings and lists of plain values on one line if it is short, and texts of several lines in quotes."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text or "${" in text else None)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        return self._on_one_line(node, mapping)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return self._on_one_line(super().represent_sequence(tag, sequence, flow_style), sequence)

    @staticmethod
    def _on_one_line(node: Any, value: Any) -> Any:
        node.flow_style = len(json.dumps(value)) < 100
        return node


_Dumper.add_representer(str, _Dumper.represent_str)


@dataclass(frozen=True)
class Recipe:
    """A file: `about` is its first comment, `tree` its settings, `options` of the search (None: a layout by hand).

    `seconds` per step; `gigabytes` on the fullest GPU, of `available`.
    """

    name: str
    about: str
    tree: dict[str, Any]
    cluster: Path
    options: str | None
    seconds: float | None = None
    gigabytes: float | None = None
    available: float | None = None

    @classmethod
    def read(cls, path: Path) -> Recipe:
        text = path.read_text(encoding="utf-8")
        comments = [line for line in text.splitlines() if line.startswith("#")]
        searched, by_hand = _SEARCHED.search(text), _BY_HAND.search(text)
        options = searched and searched["options"]
        cluster = re.search(r"--cluster (\S+)", options)[1] if options else by_hand["cluster"]  # type: ignore[index]
        figures = found.groupdict() if (found := _EXPECTED.search(text)) else {}
        seconds, gigabytes, available = (
            float(value) if (value := figures.get(name)) else None for name in ("seconds", "gb", "of")
        )
        about = "\n".join(line for line in comments if not line.startswith(("# Layout:", "# Expected:")))
        return cls(path.stem, about, yaml.safe_load(text), Path(cluster), options, seconds, gigabytes, available)

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.yaml"

    @cached_property
    def kind(self) -> str:
        return "train" if "actor" in self.tree else "dpo" if "dpo" in self.tree else "rm"

    def overrides(self) -> list[str]:
        """Settings that put a shape in the place of each checkpoint."""
        resolved = read_tree(self.path)
        roles = {role: resolved[role]["checkpoint"] for role in MODELS if "checkpoint" in (resolved.get(role) or {})}
        roles = {role: roles["actor"] if checkpoint == SAME else checkpoint for role, checkpoint in roles.items()}
        return [
            *(f"{role}.checkpoint=null" for role in roles),
            *(f"{role}.init={shape_of(str(checkpoint))}" for role, checkpoint in roles.items()),
        ]

    def settings(self) -> Any:
        """Settings as their command reads them, with shapes and without looking at files."""
        return load_config(COMMANDS[self.kind], self.path, [*self.overrides(), "runtime.device=cuda"])

    def planned(self) -> Recipe:
        available = read_cluster(self.cluster).gpu.memory_bytes / 1e9
        if self.options is None:
            config = self.settings()
            assert isinstance(config, SupervisedConfig)
            return replace(self, gigabytes=max(planned_memory(config, on_cpu=False)) / 1e9, available=available)
        with tempfile.TemporaryDirectory() as out:
            status = oppo(["plan", "search", str(self.path), *self.options.split(), "--out", out, *self.overrides()])
            if status:
                raise SystemExit(status)
            first = json.loads((Path(out) / "plan.json").read_text(encoding="utf-8"))["plans"][0]
            plan = yaml.safe_load((Path(out) / "plan.yaml").read_text(encoding="utf-8"))
        return replace(
            self, tree=laid_out(self.tree, plan), seconds=first["step_s"], gigabytes=first["fullest_gb"], available=available
        )

    def write(self) -> None:
        step = "" if self.seconds is None else f"{self.seconds:.3g} s per step, "
        layout = f"by hand, for {self.cluster}" if self.options is None else f"oppo plan search {self.path} {self.options}"
        expected = f"# Expected: {step}{self.gigabytes:.1f} of {self.available:g} GB on the fullest GPU (predicted)"
        body = yaml.dump(self.tree, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
        self.path.write_text("\n".join((self.about, f"# Layout: {layout}", expected, body)), encoding="utf-8")

    def row(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.3g}"
        gpus, kind = read_cluster(self.cluster), self.cluster.stem.removesuffix("-cluster").partition("-")[2].upper()
        roles = self.tree.get("placement", {}).get("mode", "")
        about = self.about.splitlines()[0].removeprefix("# ").rstrip(".")
        cells = (
            f"[{self.name}]({self.name}.yaml)", about, f"{gpus.num_ranks} x {kind}",
            layout_text(self.tree) or roles, f"{self.gigabytes:.1f} of {self.available:g}", seconds,
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def shape_of(checkpoint: str) -> Path:
    """Shape of a model by its folder's name, of a trained one by its recipe's model."""
    if trained := re.search(r"runs/([^/]+)/weights", checkpoint):
        return shape_of(Recipe.read(FOLDER / f"{trained[1]}.yaml").tree["model"]["checkpoint"])
    name = Path(checkpoint).name.lower()
    found = [path for path in SHAPES.glob("*.json") if path.stem in name]
    if len(found) != 1:
        raise SystemExit(
            f"{checkpoint}: {len(found)} shapes in {SHAPES} are named like it; put its config.json there as {name}.json"
        )
    return found[0]


def laid_out(tree: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's settings with the plan's layout in place of their own."""
    found = json.loads(json.dumps(tree))
    found["placement"] = _given(plan["placement"], {"reference": "scorer"})
    for role in MODELS:
        planned = plan.get(role)
        if planned is None:
            continue
        layout = {key: _given(value) if isinstance(value := planned.get(key), dict) else value for key in LAYOUT}
        if "train" in layout and layout["train"]:
            usual = (*((key, 1) for key in ("vpp", "cp", "ep")), ("sequence_parallel", False), ("recompute", "none"))
            layout["train"] = {key: value for key, value in layout["train"].items() if (key, value) not in usual}
        layout = {key: value for key, value in layout.items() if value}
        own = {key: value for key, value in found.get(role, {"checkpoint": SAME}).items() if key not in LAYOUT}
        if role in found or layout:
            found[role] = own | layout
    found["runtime"]["micro_batch_tokens"] = plan["runtime"]["micro_batch_tokens"]
    found["overlap"]["chunk"] = plan["overlap"]["chunk"]
    found["overlap"]["delta"] |= {key: plan["overlap"]["delta"][key] for key in ("initial", "max")}
    return found


def _given(section: Mapping[str, Any], defaults: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return a section without what is not set or is as by default."""
    plain = {key: _given(value) if isinstance(value, dict) else value for key, value in section.items()}
    return {key: value for key, value in plain.items() if value is not None and defaults.get(key) != value}


def layout_text(tree: Mapping[str, Any]) -> str:
    """Sizes of the trained model as it generates and as it is trained."""
    placement = tree.get("placement", {})
    model = tree.get("actor", tree.get("model", {}))
    serving = model.get("parallel") or placement.get("actor") or tree.get("parallel") or {}
    trained = model.get("train", {})
    training = {**serving, **{key: trained[key] for key in ("tp", "pp", "dp", "cp", "ep") if key in trained}}
    texts = [" ".join(f"{key} {size}" for key, size in sizes.items() if size > 1) or "1" for sizes in (serving, training)]
    return texts[0] if texts[0] == texts[1] or "actor" not in tree else f"{texts[0]}; trained {texts[1]}"


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes to plan")
    known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    chosen = parser.parse_args(names).names or known
    if unknown := sorted({*chosen} - {*known}):
        parser.error(f"{', '.join(unknown)}: not in {FOLDER}; choose of {', '.join(known)}")
    for name in chosen:
        print(f"{name}:", flush=True)
        Recipe.read(FOLDER / f"{name}.yaml").planned().write()
        write_table(known)


def write_table(names: Sequence[str]) -> None:
    recipes = [Recipe.read(FOLDER / f"{name}.yaml") for name in names]
    head = ("recipe", "trains", "GPUs", "actor (or model)", "GB on the fullest", "s per step")
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(recipe.row() for recipe in recipes if recipe.gigabytes)]
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split("<!-- table -->\n", 1)
    after = rest.split("<!-- end of table -->", 1)[1]
    PAGE.write_text("".join((before, "<!-- table -->\n", "\n".join(table), "\n<!-- end of table -->", after)), encoding="utf-8")


if __name__ == "__main__":
    main()
