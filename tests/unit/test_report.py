"""`oppo report` of run directories made by hand: every part of the page, missing data, hostile texts, long runs."""

import json
import re
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from oppo_megatron.cli.main import main
from oppo_megatron.errors import DataError
from oppo_megatron.report.charts import COLOURS, MAX_POINTS, BarChart, Chart, Line, LineChart, draw, png, short
from oppo_megatron.report.machine import MAX_BARS, step_section, timeline_section, utilization_section
from oppo_megatron.report.page import render
from oppo_megatron.report.run_records import distinct_names, read_run, read_runs, split_step, without_downtime
from oppo_megatron.report.sections import length_section, make_sections, write_report
from oppo_megatron.report.timeline import Timeline
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.trace import Span, read_spans
from tests.support.commands import refused
from tests.support.runs import Element, append, metrics_line, parse, rollout, write_run

PARTS = [
    "overview", "reward", "heldout", "learning", "steps", "timeline", "utilization", "deferrals", "control", "lengths", "bins",
    "memory", "samples",
]  # fmt: skip
LEARNING = {
    "kl", "kl-coefficient", "entropy", "clip-fraction", "approx-kl", "actor-loss", "response-length", "truncated",
    "groups", "explained-variance", "value", "critic-loss", "critic-clip-fraction", "grad-norm", "lr",
}  # fmt: skip


def undrawn(*runs: RunDirectory) -> Element:
    """The page without its pictures, which take time."""
    records = read_runs(runs)
    return parse(render([record.name for record in records], make_sections(records), {}))


def charts_of(*runs: RunDirectory) -> dict[str, Chart]:
    charts = [chart for part in make_sections(read_runs(runs)) for chart in part.charts]
    return {chart.name: chart for chart in charts if not isinstance(chart, Timeline)}


def lines_of(*runs: RunDirectory, chart: str) -> list[Line]:
    """The lines of a chart, without the faint ones."""
    return [line for line in charts_of(*runs)[chart].lines if line.style != "faint"]


def axes_of(chart: Chart) -> Any:
    (axes,) = draw(chart).axes
    return axes


def section(page: Element, name: str) -> Element:
    (found,) = page.all("section", id=name)
    return found


def notes(page: Element) -> dict[str, str]:
    return {part.attributes["id"]: part.text() for part in page.all("section") if part.all("p", **{"class": "missing"})}


def cells(part: Element) -> dict[str, list[str]]:
    return {row.all("th")[0].text(): [cell.text() for cell in row.all("td")] for row in part.all("tr") if row.all("td")}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    first, second = write_run(folder / "first"), write_run(folder / "second", steps=6)
    assert main(["report", str(first.path), str(second.path), "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_every_part_is_there_and_nothing_comes_from_outside(written: Path) -> None:
    html = (written / "index.html").read_text()
    page = parse(html)
    assert [part.attributes["id"] for part in page.all("section")] == PARTS and notes(page) == {}
    for name in PARTS[1:-1]:
        assert section(page, name).all("img"), name
    outside = [value for value in re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"'\s>)]+)", html) if value[0] != "#"]
    assert all(value.startswith("data:image/") for value in outside)
    assert not page.all("link") and not page.all("script") and len(html) < 4e6
    for picture in page.all("img"):
        assert b64decode(picture.attributes["src"].removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    pictures = {path.stem for path in written.glob("*.png")}
    assert pictures == {
        "reward-steps", "reward-seconds", "steps-mean", "steps-0", "steps-1", "timeline", "utilization", "deferrals", "delta",
        "chunk", "lengths", "length-gap", "bins", "bins-steps", "memory", "heldout-0", "heldout-1", *LEARNING,
    }  # fmt: skip
    assert all((written / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_the_command_refuses_a_step_without_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "report", write_run(tmp_path / "run").path, "--step", "99", "--no-png")
    assert "oppo report: reading run" in said and "steps 1 to 4" in said


def test_axes_have_names_and_charts_have_legends(tmp_path: Path) -> None:
    for name, chart in charts_of(write_run(tmp_path / "run", steps=2)).items():
        figure = draw(chart)
        (axes,) = figure.axes
        rows = isinstance(chart, BarChart) and chart.horizontal
        assert axes.get_xlabel() and (rows or axes.get_ylabel()) and figure.legends, name
        if isinstance(chart, LineChart) and chart.x_label == "step":
            assert all(tick == round(tick) for tick in axes.get_xticks()), f"{name}: no tick between steps"


def test_figures_are_those_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    page = undrawn(run)
    overview = cells(section(page, "overview"))
    assert overview["steps done"] == ["4"] and overview["state"] == ["finished"] and overview["seconds per step"] == ["2 s"]
    assert overview["best step, held out"] == ["3 (pkg.judge:score 0.3)"]
    (reward,) = lines_of(run, chart="reward-steps")
    assert reward.xs == [1, 2, 3, 4] and reward.ys == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert lines_of(run, chart="reward-seconds")[0].xs == [2, 4, 6, 8]
    assert [line.ys[-1] for line in lines_of(run, chart="memory")] == [204.0, 100.0]
    assert cells(section(page, "deferrals"))["run"] == ["75.00 %", "25.00 %", "0.25"]
    (change,) = section(page, "control").all("tbody")[0].all("tr")
    assert [cell.text() for cell in change.all("td")][:2] == ["Δ", "4 → 5"] and "improves <b>much" in change.text()
    assert "0.25 s (12 %)" in section(page, "steps").text()
    assert cells(section(page, "memory"))["1"] == ["50", "204", "150", "1.03"]
    waiting = cells(section(page, "timeline"))
    assert waiting["run, rank 0 actor"] == ["25 %", "wait_scores 0.5 s"] and waiting["run, rank 1 critic"] == ["0 %", "–"]


def test_a_step_is_split_without_a_rest() -> None:
    parts = split_step(metrics_line(1))
    assert sum(parts.values()) == pytest.approx(2.0)
    assert parts["decode_s"] == pytest.approx(0.9), "waits of the pipeline are idle time"
    crowded = split_step({"step_s": 1.0, "decode_s": 0.9, "score_exposed_s": 0.4, "train_s": 0.3})
    assert crowded["decode_s"] == pytest.approx(0.3) and crowded["idle_s"] == 0.0


def test_missing_data_is_reported_in_its_place(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rollouts=False)
    run.metrics.write_text(json.dumps({"step": 1, "time_s": 1.0, "step_s": 1.0, "reward_mean": 0.5}) + "\n")
    run.trace.unlink()
    run.summary.unlink()
    said = notes(undrawn(run))
    assert said.keys() == set(PARTS) - {"overview", "reward", "steps"}
    assert "logging.trace=true" in said["timeline"] and "logging.rollouts=true" in said["samples"]


def test_a_run_without_a_step_and_one_of_sft(tmp_path: Path) -> None:
    fresh = write_run(tmp_path / "fresh", steps=0, finished=False, rollouts=False)
    sft = write_run(tmp_path / "sft", finished=False, rollouts=False)
    sft.metrics.write_text('{"step": 1, "time_s": 1.0, "step_s": 1.0, "loss": 2.0}\n')
    page = undrawn(fresh, sft)
    assert set(notes(page)) >= set(PARTS[1:]) - {"timeline", "samples"}
    assert "no step has ended yet" in section(page, "reward").text()
    assert lines_of(fresh, sft, chart="loss-steps")[0].ys == [2.0]


def test_a_supervised_run_shows_its_own_figures(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "rm")
    run.path.mkdir()
    for step in (1, 2, 3):
        figures = {"loss": 0.7, "accuracy": 0.6, "margin": 0.1, "lr": 1e-4, "grad_norm": 1.0, "time_s": step}
        append(run.metrics, {"step": step, **figures, "heldout": {"loss": 0.69, "accuracy": 0.55}})
    charts = charts_of(run).keys()
    assert charts >= {"loss-steps", "pair-accuracy", "pair-margin", "grad-norm", "lr", "heldout-0", "heldout-1"}
    assert "kl" not in charts


def test_settings_of_one_command_only_are_not_differences(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, rollouts=False) for name in ("sft", "rm", "ppo")]
    common = {"seed": 1, "data": {"path": "rows.jsonl", "turns": "last"}}
    for run, own in zip(runs, ({"epochs": 3}, {"epochs": 1}, {"ppo": {"gamma": 1.0}, "seed": 2}), strict=True):
        run.config.write_text(yaml.safe_dump(common | own | {"run_dir": str(run.path)}))
    found = cells(section(undrawn(*runs), "overview"))
    assert found["epochs"] == ["3", "1", "–"] and found["seed"] == ["1", "1", "2"]
    assert not {"ppo.gamma", "data.path", "data.turns", "run_dir"} & found.keys()


def test_a_run_under_way(tmp_path: Path) -> None:
    """Spans are still in the ranks' files, and every file may end within a line."""
    run = write_run(tmp_path / "run", finished=False)
    for path in (run.metrics, run.rollouts, run.rank_trace(0)):
        path.write_text(path.read_text() + '{"step": 5, "tru')
    page = undrawn(run)
    assert "not finished" in section(page, "overview").text() and "best step" not in section(page, "overview").text()
    assert set(notes(page)) == {"memory"} and page.all("article")


def test_greedy_rows_are_not_samples(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = [rollout(1, k, "greedy" if k % 2 else "sampled") | {"greedy": bool(k % 2)} for k in range(6)]
    run.rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    responses = [pre.text() for pre in undrawn(run).all("pre", **{"class": "response"})]
    assert responses and set(responses) == {"sampled"}


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a<script>alert(1)</script>&amp;$x_$\x1b", steps=2)
    bad = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[31m\u202e\ud800"
    run.rollouts.write_text("".join(json.dumps(rollout(step, k, bad)) + "\n" for step in (1, 4) for k in range(3)))
    for step, delta in ((3, 7), (4, 8)):
        append(run.metrics, {**metrics_line(5), "step": step, "delta": delta, "delta_reason": bad})
    page = undrawn(run)
    assert not page.all("script") and not page.all("img", onerror="alert(2)")
    responses = [pre.text() for pre in page.all("pre", **{"class": "response"})]
    assert responses and all(text.startswith("</pre></script><script>alert(1)") for text in responses)
    assert not any(character in page.text() for character in "\x00\x1b\u202e")
    assert "</pre></script>" in section(page, "control").text()


def test_a_chart_shows_names_as_they_are() -> None:
    chart = LineChart("n", "$x_1$", "x", "y", [Line("_$hidden$\x00", [1, 2], [3.0, None], "#000000")])
    figure = draw(chart)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [" _$hidden$\ufffd"]
    assert png(figure).startswith(b"\x89PNG")


def test_a_long_run_stays_small_and_of_many_ranks_the_least_used_are_shown(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run", steps=300, pieces=20))
    steps = step_section([record]).charts[1]
    assert isinstance(steps, BarChart) and len(steps.categories) <= MAX_BARS
    assert [chart.name for chart in timeline_section([record], [33, 150]).charts] == ["timeline-33", "timeline-150"]
    axes = axes_of(LineChart("n", "t", "x", "y", [Line("a", range(10**5), range(10**5), "#000000")]))
    assert len(axes.get_lines()[0].get_xdata()) <= MAX_POINTS
    spans = [Span(rank, "actor", "decode", 2, 0.0, 1.0 + rank) for rank in range(500)]
    (chart,) = utilization_section([replace(record, spans=spans)]).charts
    assert isinstance(chart, BarChart)
    assert len(chart.categories) == 64 and chart.categories[0].endswith("rank 0") and "of 500 ranks" in chart.title


def test_ranks_of_different_work_have_their_means(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run"))
    ends = [("decode", 4.0), ("decode", 2.0), ("score", 1.0), ("update", 4.0)]
    spans = [Span(rank, "actor", name, 2, 0.0, end) for rank, (name, end) in enumerate(ends)]
    (chart,) = utilization_section([replace(record, spans=spans)]).charts
    assert isinstance(chart, BarChart) and len(chart.categories) == 3 + len(ends)
    means = dict(zip(chart.categories[:3], chart.ends[:3], strict=True))
    assert {name.partition(" \N{MIDDLE DOT} ")[2]: note for name, note in means.items()} == {
        "ranks that decode, mean": "75 %", "ranks that score, mean": "25 %", "ranks that update, mean": "100 %",
    }  # fmt: skip


def test_spans_are_the_same_before_and_after_the_merge(tmp_path: Path) -> None:
    going, ended = write_run(tmp_path / "going", finished=False), write_run(tmp_path / "ended")
    before, after = (sorted(read_spans(run), key=str) for run in (going, ended))
    assert [(s.rank, s.role, s.name, s.step) for s in before] == [(s.rank, s.role, s.name, s.step) for s in after]
    assert [s.start for s in before] == pytest.approx([s.start for s in after], abs=1e-6)


def test_runs_get_names_that_differ(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / seed / "oppo", rollouts=False) for seed in ("one", "two")]
    assert [record.name for record in read_runs([run.path for run in runs])] == ["one/oppo", "two/oppo"]
    assert distinct_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    with pytest.raises(DataError, match="given twice"):
        read_runs([runs[0].path, f"{runs[0].path}/."])


@pytest.mark.parametrize(("kind", "reported"), [
    ("absent", "no such directory"), ("file", "a file; give the run_dir"), ("empty", "neither metrics.jsonl nor config.yaml"),
    ("parent", "it holds the runs inner: name those"), ("later", "format 99"), ("torn", "line 2"), ("stepless", "`step` is None"),
])  # fmt: skip
def test_other_folders_are_refused(kind: str, reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("x")
    elif kind in ("empty", "parent"):
        path.mkdir()
        if kind == "parent":
            write_run(path / "inner", rollouts=False)
    elif kind != "absent":
        run = write_run(path, rollouts=False)
        if kind == "later":
            write_json(run.hosts, {"format": 99})
        elif kind == "torn":
            first, *rest = run.metrics.read_text().splitlines(keepends=True)
            run.metrics.write_text(first + "{\n" + "".join(rest))
        else:
            run.metrics.write_text("{}\n")
    for options in ([], ["--watch"]):
        assert reported in refused(capsys, "report", path, *options)
    assert not (path / "report").exists()


def test_a_page_of_another_program_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>mine</h1>")
    with pytest.raises(DataError, match="is not a report"):
        write_report([write_run(tmp_path / "run")], tmp_path)


def test_fields_of_a_wrong_type_count_as_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    append(run.metrics, {"step": 3, "reward_mean": "high", "step_s": None, "deferred": [1], "memory_peak_mb": {}, "delta": True})
    append(run.metrics, {**metrics_line(4), "step": 4, "deferred": {"x": 1, "2": "y"}, "memory_peak_mb": ["a", None]})
    append(run.metrics, {**metrics_line(4), "step": 5, "reward_mean": float("nan"), "step_s": float("inf")})
    page = undrawn(run)
    assert read_run(run).known("reward_mean")[0] == [1, 2, 4]
    assert main(["report", str(run.path), "--watch"]) == 0
    assert "nan" not in section(page, "overview").text() and "inf" not in section(page, "overview").text()


def test_gaps_within_groups_are_shown_with_those_of_the_batch(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run", steps=2).path)
    plain = replace(record, name="plain", lines=[line | {"group_length_gap": None} for line in record.lines])
    (chart,) = [each for each in length_section([record, plain]).charts if each.name == "length-gap"]
    assert isinstance(chart, LineChart)
    found = {line.name: line.ys for line in chart.lines}
    assert found == {"run": [0.2, 0.2], "run, within groups": [0.5, 0.5], "plain": [0.2, 0.2]}


def test_a_covered_line_is_wider_and_numbers_are_short() -> None:
    values = {"a": [3.0, 3.0], "b": [3.0, 4.0], "c": [3.0, 3.0]}
    lines = [Line(name, [1, 2], ys, COLOURS["decode"]) for name, ys in values.items()]
    wide, other, top = (line.get_linewidth() for line in axes_of(LineChart("n", "t", "x", "y", lines)).get_lines())
    assert wide > other == top
    numbers = {0: "0", 12: "12", 1234.5: "1,234", 0.12345: "0.123", 1e-7: "1e-07", -4e9: "-4e+09"}
    assert {value: short(value) for value in numbers} == numbers


def test_time_between_attempts_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    whole = read_run(run.path)
    raw = read_spans(run)
    later = [replace(s, start=s.start + 60, end=s.end + 60) if s.step > 2 else s for s in raw]
    ends = [time for s in without_downtime(later, whole.lines) for time in (s.start, s.end)]
    assert sorted(ends) == pytest.approx(sorted(time for s in whole.spans for time in (s.start, s.end)), abs=0.21)
    in_order = sorted(later, key=lambda s: s.start)
    assert without_downtime(later, [{**line, "step_s": 61.0} for line in whole.lines]) == in_order
    assert without_downtime(later, whole.lines[:2]) == in_order, "step 3 has no line yet"


def test_a_single_step(tmp_path: Path) -> None:
    charts = charts_of(write_run(tmp_path / "run", steps=1))
    assert charts["steps-mean"].title == "Mean step"
    assert axes_of(charts["reward-steps"]).get_lines()[-1].get_marker() == "o", "one point is visible"


def test_learning_curves_have_notes(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "first"), write_run(tmp_path / "second", steps=6)
    assert [line.ys[:2] for line in lines_of(*runs, chart="kl")] == [[0.1, 0.2]] * 2
    charts = charts_of(*runs)
    assert charts.keys() >= LEARNING
    for name in [*LEARNING, "heldout-0", "heldout-1"]:
        assert re.search("Healthy|schedule|adaptive", charts[name].note), name


def test_heldout_metrics_have_standard_errors_and_include_the_step_before_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    summary = json.loads(run.summary.read_text())
    write_json(run.summary, summary | {"heldout": {"0": {"mean": {"pkg.judge:score": 0.05}, "error": {"pkg.judge:score": 0.01}}}})
    chart = charts_of(run)["heldout-0"]
    (line,) = chart.lines
    assert line.xs == (0, 1, 2, 3, 4) and line.ys[:2] == (0.05, 0.1) and line.errors[:2] == (0.01, 0.02)
    (bars,) = axes_of(chart).collections
    assert [tuple(path.vertices[:, 1]) for path in bars.get_paths()][1] == pytest.approx((0.08, 0.12))
