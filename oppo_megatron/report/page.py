"""The report's sections, and its HTML file, which needs no other file and no script."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from oppo_megatron import __version__
from oppo_megatron.report.charts import BarChart, Chart, short, show
from oppo_megatron.report.run_records import RunRecord
from oppo_megatron.report.timeline import Timeline

LONGEST_TEXT = 4000
HEADING = "<h1>Run report</h1>"
"""Marks pages that this program wrote."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Table:
    """Rows of text under `head`; the first column names the row.  `folded`: hidden under its title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass
class Section:
    """A part of the page.  `missing` lists, per run, what was not recorded."""

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
    """Return the HTML; all text from runs is escaped.  `pictures`: PNGs by the names of charts."""
    links = "".join(f'<a href="#{each.name}">{escape(each.heading)}</a>' for each in sections)
    body = "".join(_section(section, pictures) for section in sections)
    names = ", ".join(_text(run) for run in runs)
    style = files("oppo_megatron.report").joinpath("files/page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{names}: run report</title><style>{style}</style></head><body>"
        f'<header>{HEADING}<p class="runs">{names}</p><nav>{links}</nav></header><main>{body}</main>'
        f"<footer>oppo_megatron {escape(__version__)}</footer></body></html>\n"
    )


def _text(text: str) -> str:
    return escape(show(text))


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", _text(text))


def _section(section: Section, images: Mapping[str, bytes]) -> str:
    missing = "".join(f'<p class="missing">{_prose(note)}</p>' for note in section.missing)
    pictures = "".join(_picture(chart, images[chart.name]) for chart in section.charts if chart.name in images)
    grid = f'<div class="grid">{pictures}</div>' if pictures else ""
    tables = "".join(_table(table) for table in section.tables)
    samples = "".join(
        f'<h3>{_text(name)}</h3><div class="samples">{"".join(_sample(row) for row in rows)}</div>'
        for name, rows in section.samples
    )
    return (
        f'<section id="{section.name}"><h2>{escape(section.heading)}</h2><p class="about">{_prose(section.about)}</p>'
        f"{missing}{grid}{tables}{samples}</section>"
    )


def _picture(chart: Chart | Timeline, png: bytes) -> str:
    wide = isinstance(chart, Timeline) or (isinstance(chart, BarChart) and chart.horizontal)
    note = f'<p class="note">{_prose(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure id="chart-{_text(chart.name)}" class="panel{" wide" if wide else ""}">'
        f'<img src="data:image/png;base64,{b64encode(png).decode()}" alt="{_text(chart.title)}">{note}</figure>'
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in table.head)
    rows = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table.rows
    )
    whole = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    if table.folded:
        return f"<details><summary>{_text(table.title)}</summary>{whole}</details>"
    return (f"<h3>{_text(table.title)}</h3>" if table.title else "") + whole


def _sample(row: Mapping[str, Any]) -> str:
    tokens, deferrals = row.get("tokens"), row.get("deferrals")
    facts = [f"step {row['step']}", f"sequence {row.get('seq_id', '–')}"]
    facts += [f"{len(tokens)} tokens"] if isinstance(tokens, list) else []
    facts += [f"deferred {deferrals}×"] if deferrals else []
    facts += ["cut at the limit"] if row.get("finish_reason") == "length" else []
    return (
        f'<article class="sample"><p class="facts"><b class="reward">reward {short(row["reward"])}</b> '
        f"{_text(' · '.join(facts))}</p>"
        f'<pre class="prompt" dir="auto">{_cut(row.get("prompt"))}</pre>'
        f'<pre class="response" dir="auto">{_cut(row.get("response"))}</pre></article>'
    )


def _cut(text: Any) -> str:
    whole = str(text) if text is not None else ""
    more = len(whole) - LONGEST_TEXT
    return _text(whole[:LONGEST_TEXT]) + (f'<i class="more"> … {more:,} more characters</i>' if more > 0 else "")
