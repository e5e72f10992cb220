"""The report of a real run on two ranks, in a real browser: no error, every step can be chosen, zoomed and moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo_megatron.report.build import write_report
from tests.support.pages import Element, embedded, opened, parse
from tests.support.ppo import Workspace, run_ppo_ranks
from tests.support.runs import write_run
from tests.unit.test_report import PARTS, notes

STEPS = 4


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with both overlaps, beside one that is made up."""
    workspace = Workspace.create(tmp_path_factory.mktemp("report"))
    delta = {"rule": "eq4", "initial": 4, "max": 4, "window": 1}
    overlaps = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": delta}
    config = workspace.config("oppo", placement={"mode": "disaggregated"}, steps=STEPS, **overlaps)
    run_ppo_ranks(config)
    out = workspace.root / "out"
    write_report([config["run_dir"], write_run(workspace.root / "made", STEPS)], out, pictures=False)
    return out


@pytest.fixture(scope="module")
def page(out: Path) -> Element:
    return parse((out / "index.html").read_text())


def test_a_real_run_has_every_part(page: Element) -> None:
    assert [part.attributes["id"] for part in page.all("section")] == PARTS
    assert notes(page).keys() == {"heldout"}, "it was made without held-out rows; all else is there"
    charts, timelines = embedded(page, "charts"), embedded(page, "timelines")
    assert {len(line["xs"]) for chart in charts.values() for line in chart["lines"]} == {STEPS}
    assert all(note for line in charts["delta"]["lines"] for note in line["notes"])
    assert [[step[0] for step in run["steps"]] for run in timelines] == [list(range(1, STEPS + 1))] * 2
    for run in timelines[:1]:
        assert {lane.split(" ")[-1] for lane in run["lanes"]} >= {"actor", "critic", "reference", "reward"}
        assert {kind for kind, _ in run["kinds"]} >= {"decode", "score", "update"}
    assert len(page.all("article")) >= 12 and any(note for line in charts["chunk"]["lines"] for note in line["notes"])


USE = """
const [svg] = document.querySelectorAll(".timeline svg"), note = (name, value) => { document.body.dataset[name] = value; };
const state = () => [svg.dataset.step, svg.dataset.from, svg.dataset.to, svg.querySelectorAll("rect").length].join(" ");
const box = svg.getBoundingClientRect(), middle = {clientX: box.left + 0.6 * box.width, clientY: box.top + 18, bubbles: true};
const [input] = document.querySelectorAll(".timeline input");
input.value = 2; input.dispatchEvent(new Event("change")); note("chosen", state());
svg.dispatchEvent(new WheelEvent("wheel", {...middle, deltaY: -800, cancelable: true})); note("zoomed", state());
svg.setPointerCapture = () => {};
svg.dispatchEvent(new PointerEvent("pointerdown", {...middle, pointerId: 1}));
svg.dispatchEvent(new PointerEvent("pointermove", {...middle, clientX: middle.clientX - 60, pointerId: 1}));
svg.dispatchEvent(new PointerEvent("pointerup", {pointerId: 1})); note("moved", state());
svg.dispatchEvent(new MouseEvent("dblclick")); note("whole", state());
document.querySelector("button[aria-label='next step']").click(); note("next", state());
svg.dispatchEvent(new PointerEvent("pointermove", {...middle, clientX: box.left + 0.3 * box.width}));
const tip = document.querySelector(".timeline .tip"); note("tip", tip.hidden ? "" : tip.textContent);
const chart = document.querySelector("[data-chart=delta] svg"), place = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", {clientX: place.left + place.width / 2, clientY: place.top + 20}));
note("reason", document.querySelector("[data-chart=delta] .tip").textContent);
note("wide", document.documentElement.scrollWidth <= innerWidth ? "no" : "yes");
"""


def test_in_a_browser(out: Path, tmp_path: Path) -> None:
    dom, failed = opened(out / "index.html", USE, tmp_path)
    assert failed == []
    assert dom.all("html")[0].attributes["data-ready"] == "yes"
    seen = {name.removeprefix("data-"): value for name, value in dom.all("body")[0].attributes.items()}
    number = {
        name: [int(part) for part in seen[name].split()] for name in ("chosen", "zoomed", "moved", "whole", "next")
    }
    step, start, end, rects = number["chosen"]
    assert step == 2 and start == 0 and rects > 5
    _, zoomed_from, zoomed_to, _ = number["zoomed"]
    assert 0 < zoomed_from < zoomed_to < end and zoomed_to - zoomed_from < 0.5 * end
    _, moved_from, moved_to, _ = number["moved"]
    assert moved_from > zoomed_from and abs((moved_to - moved_from) - (zoomed_to - zoomed_from)) <= 2
    assert number["whole"] == number["chosen"] and number["next"][0] == 3
    assert "rank 0 · actor" in seen["tip"] and "step" in seen["reason"] and "delta" in seen["reason"]
    assert seen["wide"] == "no", "nothing is wider than the window"
    for host in dom.all("div", **{"class": "timeline"}):
        assert host.all("svg")[0].all("text", **{"class": "lane"}) and host.all("ul")[0].all("li")
