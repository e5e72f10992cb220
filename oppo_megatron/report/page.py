"""The report's sections, and its HTML file, which needs no other file and no script."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from oppo_megatron import __version__
from oppo_megatron.report.charts import Chart, short, show
from oppo_megatron.report.run_records import RunRecord
from oppo_megatron.report.timeline import Timeline

LONGEST_TEXT = 4000
HEADING = "<h1>Run report</h1>"
"""Marks pages that this program wrote."""


@dataclass(frozen=True)
class Table:
    """Rows of text, named by the first column.  `folded`: hidden under the title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass
class Section:
    """A part of the page.  `missing`: per run, data not recorded."""

    name: str
    heading: str
    about: str
    charts: list[Chart | Timeline] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    samples: list[tuple[str, list[Mapping[str, Any]]]] = field(default_factory=list)

    def lacks(self, record: RunRecord, what: str, why: str = "") -> None:
        if not record.lines:
            why = "no step has ended yet"
        elif not why:
            why = "it was `oppo sft` or `oppo rm`" if record.kind == "supervised" else "no step has it"
        self.missing.append(f"{record.name}: no {what} ({why}).")


def render(runs: Sequence[str], sections: Sequence[Section], pictures: Mapping[str, bytes]) -> str:
    """HTML, with text from runs escaped.  `pictures`: PNGs by chart."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, loader=PackageLoader("oppo_megatron.report", "files"),
        finalize=lambda value: show(value) if type(value) is str else value,  # else a macro's output, already escaped
    )  # fmt: skip
    environment.filters |= {"short": short, "facts": _facts}
    return environment.get_template("page.html").render(
        runs=runs, sections=sections, images={name: b64encode(png).decode() for name, png in pictures.items()},
        style=files("oppo_megatron.report").joinpath("files/page.css").read_text(encoding="utf-8"), heading=HEADING,
        longest=LONGEST_TEXT, version=__version__,
    )  # fmt: skip


def _facts(row: Mapping[str, Any]) -> str:
    tokens, deferrals = row.get("tokens"), row.get("deferrals")
    facts = [f"step {row['step']}", f"sequence {row.get('seq_id', '–')}"]
    facts += [f"{len(tokens)} tokens"] if isinstance(tokens, list) else []
    facts += [f"deferred {deferrals}×"] if deferrals else []
    facts += ["cut at the limit"] if row.get("finish_reason") == "length" else []
    return " · ".join(facts)
