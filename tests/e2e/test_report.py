"""The report of a real run on two ranks has every part."""

from __future__ import annotations

from pathlib import Path

from oppo_megatron.report.run_records import read_runs
from oppo_megatron.report.sections import make_sections, write_report
from tests.support.pages import parse
from tests.support.ppo import Workspace, run_ppo_ranks
from tests.support.runs import write_run
from tests.unit.test_report import PARTS, cells, notes, section

STEPS = 4


def test_a_real_run_has_every_part(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    delta = {"rule": "eq4", "initial": 4, "max": 4, "window": 1}
    overlaps = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": delta}
    config = workspace.config("oppo", placement={"mode": "disaggregated"}, steps=STEPS, **overlaps)
    run_ppo_ranks(config)
    runs = [config["run_dir"], write_run(tmp_path / "made", STEPS)]
    (path,) = write_report(runs, tmp_path / "out", pictures=False)
    page = parse(path.read_text())
    assert [part.attributes["id"] for part in page.all("section")] == PARTS
    assert notes(page).keys() == {"heldout"}, "it ran without held-out rows; all else is there"
    assert len(page.all("article")) >= 12
    records = read_runs(runs)
    charts = {chart.name: chart for part in make_sections(records) for chart in part.charts}
    assert {len(line.xs) for name in ("reward-steps", "kl", "delta", "lengths") for line in charts[name].lines} == {STEPS}
    waiting = cells(section(page, "timeline"))
    assert {row.split(" ")[-1] for row in waiting if row.startswith(f"{records[0].name},")} >= {
        "actor", "critic", "reference", "reward",
    }  # fmt: skip
