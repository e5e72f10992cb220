"""`oppo report`: turns run directories into the page and its pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from oppo_megatron.clock import ByTime
from oppo_megatron.errors import DataError
from oppo_megatron.report.charts import draw, png
from oppo_megatron.report.curves import heldout_section, learning_section
from oppo_megatron.report.machine import memory_section, step_section, timeline_section, utilization_section
from oppo_megatron.report.page import HEADING, Section, render
from oppo_megatron.report.run_records import RunRecord, read_runs
from oppo_megatron.report.sections import (
    control_section,
    deferral_section,
    length_bin_section,
    length_section,
    overview,
    reward_section,
    samples_section,
)
from oppo_megatron.report.timeline import Timeline, draw_windows, step_bounds
from oppo_megatron.rundir.directory import write_text

PAGE = "index.html"


def write_report(
    paths: Sequence[str | os.PathLike[str]], out: Path, steps: Sequence[int] = (), *, pictures: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Path]:  # fmt: skip
    """Write `index.html` and PNGs; return their paths.  `steps`: timelines (default: of median length).  Raises DataError."""
    page = out / PAGE
    if page.exists() and not (page.is_file() and HEADING in page.read_text(encoding="utf-8", errors="replace")):
        raise DataError(f"{page} exists and is not a report; name another folder with --out")
    records = read_runs(paths, progress)
    have = {step for record in records for step in step_bounds(record.spans)}
    for step in steps:
        if step not in have:
            known = f"steps {min(have)} to {max(have)}" if have else "no steps"
            raise DataError(f"--step {step}: the traces of these runs have {known}; name one of those")
    sections = make_sections(records, steps)
    charts = [chart for section in sections for chart in section.charts]
    images: dict[str, bytes] = {}
    by_time = ByTime(progress)
    for done, chart in enumerate(charts, start=1):
        by_time(f"drawing chart {done} of {len(charts)}")
        images[chart.name] = png(draw_windows(chart.windows) if isinstance(chart, Timeline) else draw(chart))
    out.mkdir(parents=True, exist_ok=True)
    write_text(page, render([record.name for record in records], sections, images))
    written = [page]
    for name, content in images.items() if pictures else ():
        written.append(out / f"{name}.png")
        written[-1].write_bytes(content)
    return written


def make_sections(records: Sequence[RunRecord], steps: Sequence[int] = ()) -> list[Section]:
    """Sections in order, without pictures."""
    return [
        overview(records),
        reward_section(records),
        heldout_section(records),
        learning_section(records),
        step_section(records),
        timeline_section(records, steps),
        utilization_section(records),
        deferral_section(records),
        control_section(records),
        length_section(records),
        length_bin_section(records),
        memory_section(records),
        samples_section(records),
    ]
