"""`oppo report`: from run directories to the page and its pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from oppo_megatron.clock import ByTime
from oppo_megatron.errors import DataError
from oppo_megatron.report.learning import heldout_section, learning_section
from oppo_megatron.report.machine import memory_section, step_section, utilization_section
from oppo_megatron.report.overview import overview
from oppo_megatron.report.page import HEADING, Page, Section, render
from oppo_megatron.report.plots import draw_windows
from oppo_megatron.report.png import draw
from oppo_megatron.report.progress import (
    control_section,
    deferral_section,
    length_bin_section,
    length_section,
    reward_section,
)
from oppo_megatron.report.run_records import RunRecord, read_runs
from oppo_megatron.report.samples import sample_responses
from oppo_megatron.report.timelines import SPANS_OF_PAGE, timeline
from oppo_megatron.rundir.directory import write_text
from oppo_megatron.rundir.step_window import step_window

PAGE = "index.html"


def write_report(
    paths: Sequence[str | os.PathLike[str]],
    out: Path,
    steps: Sequence[int] = (),
    *,
    pictures: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Write `index.html` and a PNG of each chart into `out`; what was written, the page first.  `tell` hears what is next.

    `steps` are those whose timeline is to be kept whole, however long the runs are.  Raises DataError.
    """
    _require_no_other(out / PAGE)
    tell(f"reading {len(paths)} run{'s' * (len(paths) > 1)}")
    records = read_runs(paths)
    _check_steps(records, steps)
    tell("making the charts")
    sections = make_sections(records)
    page = Page([record.name for record in records], sections)
    for record in records:
        tell(f"timeline and responses of {record.name}")
        _add_timeline(page, record, SPANS_OF_PAGE // len(records), steps)
        rows, why = sample_responses(record)
        if rows:
            page.samples.append((record.name, rows))
        else:
            page.no_samples.append(f"{record.name}: no responses ({why}).")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / PAGE, render(page))
    return [out / PAGE, *(_draw(records, sections, out, steps, tell) if pictures else [])]


def make_sections(records: Sequence[RunRecord]) -> list[Section]:
    """The parts of the page that are charts and tables, in its order."""
    makers = (
        overview,
        reward_section,
        heldout_section,
        learning_section,
        step_section,
        utilization_section,
        deferral_section,
        control_section,
        length_section,
        length_bin_section,
        memory_section,
    )
    return [make(records) for make in makers]


def _require_no_other(page: Path) -> None:
    """Raises DataError where the page would be written over one that is no report."""
    if page.exists() and not (page.is_file() and HEADING in page.read_text(encoding="utf-8", errors="replace")):
        raise DataError(f"{page} is there already, and is no report; name another folder with --out")


def _check_steps(records: Sequence[RunRecord], steps: Sequence[int]) -> None:
    have = {span.step for record in records for span in record.spans}
    for step in steps:
        if step not in have:
            known = f"steps {min(have)} to {max(have)}" if have else "no steps"
            raise DataError(f"--step {step}: the traces of these runs have {known}; name one of those")


def _add_timeline(page: Page, record: RunRecord, budget: int, steps: Sequence[int]) -> None:
    made = timeline(record, budget, steps) if record.spans else None
    if made is None:
        page.no_timeline.append(
            f"{record.name}: no timeline ({record.no_spans or 'its trace has no work of any step'})."
        )
        return
    if made["leftOut"]:
        page.no_timeline.append(
            f"{record.name}: {made['leftOut']} of its steps are left out of this page, for it would grow too large; "
            "`oppo report --step N` puts a step in, and trace.json has all."
        )
    page.timelines.append(made)


def _draw(
    records: Sequence[RunRecord],
    sections: Sequence[Section],
    out: Path,
    steps: Sequence[int],
    tell: Callable[[str], None],
) -> list[Path]:
    written, charts = [], [chart for section in sections for chart in section.charts]
    by_time = ByTime(tell)
    for number, chart in enumerate(charts):
        by_time(f"drawing picture {number + 1} of {len(charts)}")
        written.append(out / f"{chart.name}.png")
        draw(chart, written[-1])
    windows = {}
    for record in records:
        of_record = {span.step for span in record.spans}
        asked = next((step for step in steps if step in of_record), None)
        try:
            windows[record.name] = step_window(record.name, record.spans, asked)
        except DataError:
            continue  # the page says so
    if windows:
        written.append(out / "timeline.png")
        draw_windows(windows, written[-1])
    return written
