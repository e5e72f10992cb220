"""What a part of the page is made of, apart from HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oppo_megatron.report.charts import Chart
from oppo_megatron.report.run_records import RunRecord


@dataclass(frozen=True)
class Table:
    """Rows of text under `head`; the first column names the row.  `folded`: shown when it is asked for, under its title."""

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
