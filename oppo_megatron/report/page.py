"""The page: its sections, and the one HTML file that they become, which needs nothing beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from oppo_megatron import __version__
from oppo_megatron.report.charts import BarChart, Chart, LineChart, short
from oppo_megatron.report.colours import css_variables
from oppo_megatron.report.run_records import RunRecord
from oppo_megatron.report.svg import chart_svg, hover_data


@dataclass(frozen=True)
class Table:
    """Rows of text under `head`; the first column names the row.  `folded`: hidden under its title until it is opened."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass
class Section:
    """A part of the page.  `missing` says, run by run, what was not recorded."""

    name: str
    heading: str
    about: str
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def lacks(self, record: RunRecord, what: str, why: str = "") -> None:
        """Say in its place that a run did not record something."""
        if not why:
            why = "it was `oppo sft` or `oppo rm`" if record.kind == "supervised" else "no step has it"
            if not record.lines:
                why = "no step has ended yet"
        self.missing.append(f"{record.name}: no {what} ({why}).")


LONGEST_TEXT = 4000
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")

HEADING = "<h1>Run report</h1>"
"""The mark of a page of ours."""


@dataclass
class Page:
    """The content of the page, in order.  `samples` and `timelines` are by run, with notes on missing ones."""

    runs: Sequence[str]
    sections: list[Section]
    timelines: list[dict[str, Any]] = field(default_factory=list)
    no_timeline: list[str] = field(default_factory=list)
    samples: list[tuple[str, list[Mapping[str, Any]]]] = field(default_factory=list)
    no_samples: list[str] = field(default_factory=list)


def render(page: Page) -> str:
    """The HTML text.  Every text from a run is escaped, also within the data of the script."""
    parts = [(section.name, section.heading, _section(section)) for section in page.sections]
    after_steps = 1 + next((k for k, part in enumerate(parts) if part[0] == "steps"), len(parts) - 1)
    parts.insert(after_steps, ("timeline", "Timeline of a step", _timelines(page)))
    parts.append(("samples", "Sample responses", _samples(page)))
    links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in parts)
    body = "".join(
        f'<section id="{name}"><h2>{escape(heading)}</h2>{inner}</section>' for name, heading, inner in parts
    )
    charts = {c.name: hover_data(c) for s in page.sections for c in s.charts if isinstance(c, LineChart)}
    names = ", ".join(escape(show(run)) for run in page.runs)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">"
        f"<title>{names}: run report</title><style>{css_variables()}{_file('page.css')}</style></head><body>"
        f'<header>{HEADING}<p class="runs">{names}</p><nav>{links}</nav></header><main>{body}</main>'
        f"<footer>oppo_megatron {escape(__version__)}</footer>"
        f"{_data('charts', charts)}{_data('timelines', page.timelines)}"
        f"<script>{_file('page.js')}</script></body></html>\n"
    )


def show(text: str) -> str:
    """Text that a file and a browser can hold: non-characters, and marks that reverse the text, become \ufffd."""
    return UNSHOWABLE.sub("\ufffd", text)


def _text(text: str) -> str:
    return escape(show(text))


def _prose(text: str) -> str:
    """Text in which what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", _text(text))


def _file(name: str) -> str:
    return files("oppo_megatron.report").joinpath("files").joinpath(name).read_text(encoding="utf-8")


def _data(name: str, value: Any) -> str:
    """JSON for the script; no `<` is left that could end its element."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    return f'<script type="application/json" id="data-{name}">{text}</script>'


def _section(section: Section) -> str:
    charts = "".join(_figure(chart) for chart in section.charts)
    grid = f'<div class="grid">{charts}</div>' if charts else ""
    tables = "".join(_table(table) for table in section.tables)
    return f'<p class="about">{_prose(section.about)}</p>{_missing(section.missing)}{grid}{tables}'


def _missing(notes: Sequence[str]) -> str:
    return "".join(f'<p class="missing">{_prose(note)}</p>' for note in notes)


def _figure(chart: Chart) -> str:
    wide = " wide" if isinstance(chart, BarChart) and chart.horizontal else ""
    hover = ' data-hover="1"' if isinstance(chart, LineChart) else ""
    return (
        f'<figure class="panel{wide}" data-chart="{escape(chart.name)}"{hover}><figcaption>{_text(chart.title)}</figcaption>'
        f"{chart_svg(chart)}{_legend(chart)}{_note(chart)}</figure>"
    )


def _note(chart: Chart) -> str:
    return f'<p class="note">{_prose(chart.note)}</p>' if isinstance(chart, LineChart) and chart.note else ""


def _legend(chart: Chart) -> str:
    if isinstance(chart, BarChart):
        entries = [(bars.name, bars.colour, "bar") for bars in chart.bars]
    else:
        entries = [(line.name, line.colour, line.style) for line in chart.lines if line.style != "faint"]
    items = "".join(
        f'<li><span class="key {style}" style="--colour:var(--c-{colour})"></span>{_text(name)}</li>'
        for name, colour, style in entries
    )
    return f'<ul class="legend">{items}</ul>'


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


def _timelines(page: Page) -> str:
    about = (
        "What each rank did for each role. Choose a step; the wheel zooms, dragging moves, a double click shows the whole "
        "step. Paler: work of another step. trace.json of the run opens in Perfetto (ui.perfetto.dev), too."
    )
    widgets = "".join(f'<div class="timeline" data-run="{place}"></div>' for place in range(len(page.timelines)))
    without = '<noscript><p class="about">The timelines need JavaScript; timeline.png shows a step of each run.</p></noscript>'
    return f'<p class="about">{about}</p>{_missing(page.no_timeline)}{without if widgets else ""}{widgets}'


def _samples(page: Page) -> str:
    about = "Of the first, the middle and the last step: the responses of lowest, middle and highest reward, and the longest."
    runs = "".join(
        f'<h3>{_text(name)}</h3><div class="samples">{"".join(_sample(row) for row in rows)}</div>'
        for name, rows in page.samples
    )
    return f'<p class="about">{about}</p>{_missing(page.no_samples)}{runs}'


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
