"""`oppo report` of run directories made by hand: every part of the page, what is missing, hostile texts, long runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from oppo_megatron.cli.main import main
from oppo_megatron.errors import DataError
from oppo_megatron.report import build
from oppo_megatron.report.build import write_report
from oppo_megatron.report.charts import Line, LineChart, extent, short, ticks
from oppo_megatron.report.downtime import without_downtime
from oppo_megatron.report.png import legend_columns
from oppo_megatron.report.progress import length_section
from oppo_megatron.report.run_records import ALL_PARTS, distinct_names, read_run, read_runs, split_step
from oppo_megatron.report.svg import chart_svg
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.step_window import all_windows, step_window
from oppo_megatron.rundir.trace import read_spans
from tests.support.pages import Element, embedded, parse
from tests.support.runs import append, metrics_line, rollout, step_spans, write_run

PARTS = [
    "overview", "reward", "heldout", "learning", "steps", "timeline", "utilization", "deferrals", "control", "lengths", "bins",
    "memory", "samples",
]  # fmt: skip


def page_of(*runs: RunDirectory, out: Path) -> Element:
    write_report(list(runs), out, pictures=False)
    return parse((out / "index.html").read_text())


def section(page: Element, name: str) -> Element:
    (found,) = page.all("section", id=name)
    return found


def notes(page: Element) -> dict[str, str]:
    """What the page says is missing, by part."""
    return {part.attributes["id"]: part.text() for part in page.all("section") if part.all("p", **{"class": "missing"})}


def test_every_part_is_there_and_nothing_comes_from_outside(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", steps=6)
    page = page_of(first, second, out=tmp_path / "out")
    assert [part.attributes["id"] for part in page.all("section")] == PARTS
    assert notes(page) == {}
    for name in PARTS[1:-1]:
        if name != "timeline":
            assert section(page, name).all("svg"), name
    html = (tmp_path / "out" / "index.html").read_text()
    outside = [value for value in re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"'\s>)]+)", html) if value[0] != "#"]
    assert outside == [] and not page.all("link") and not page.all("img")


def test_axes_have_names_with_units_and_charts_have_legends(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"), out=tmp_path / "out")
    for figure in page.all("figure"):
        axes = [axis.text() for axis in figure.all("text", **{"class": "axis"})]
        wide = "wide" in figure.attributes["class"]
        assert len(axes) == (1 if wide else 2) and all(axes), figure.attributes
        assert figure.all("ul", **{"class": "legend"})[0].all("li")
        assert not any("nan" in path.attributes["d"] for path in figure.all("path"))


def test_no_tick_stands_between_steps(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", steps=2), out=tmp_path / "out")
    by_step = [each for each in page.all("figure", **{"data-hover": "1"}) if "seconds" not in each.text()]
    assert len(by_step) > 10
    for figure in by_step:
        ticks_at = [tick.text() for tick in figure.all("text", **{"text-anchor": "middle", "class": "tick"})]
        assert {"1", "2"} <= set(ticks_at) and "1.5" not in ticks_at, figure.attributes


def test_figures_are_those_of_the_run(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"), out=tmp_path / "out")
    rows = {row.all("th")[0].text(): [cell.text() for cell in row.all("td")] for row in page.all("tr") if row.all("td")}
    assert rows["steps done"] == ["4"] and rows["state"] == ["finished"] and rows["seconds a step"] == ["2 s"]
    charts = embedded(page, "charts")
    (reward,) = charts["reward-steps"]["lines"]
    assert reward["xs"] == [1, 2, 3, 4] and reward["ys"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert charts["reward-seconds"]["lines"][0]["xs"] == [2, 4, 6, 8]
    assert charts["delta"]["lines"][0]["notes"][0] == "step 1: the reward improves <b>much</b>"
    deferred = [cell.text() for cell in section(page, "deferrals").all("tr")[1].all("td")]
    assert deferred == ["75.00 %", "25.00 %", "0.25"]
    (change,) = section(page, "control").all("tbody")[0].all("tr")
    assert [cell.text() for cell in change.all("td")][:2] == ["Δ", "4 → 5"] and "improves <b>much" in change.text()
    assert "0.25 s (12 %)" in section(page, "steps").text()


def test_a_step_is_split_without_a_rest() -> None:
    parts = split_step(metrics_line(1))
    assert sum(parts.values()) == pytest.approx(2.0)
    assert parts["decode_s"] == pytest.approx(0.9), "waits of the pipeline are idle time"
    crowded = split_step({"step_s": 1.0, "decode_s": 0.9, "score_exposed_s": 0.4, "train_s": 0.3})
    assert crowded["decode_s"] == pytest.approx(0.3) and crowded["idle_s"] == 0.0


def test_what_was_not_recorded_is_said_in_its_place(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rollouts=False)
    lines = [{"step": 1, "time_s": 1.0, "step_s": 1.0, "reward_mean": 0.5}]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.trace.unlink()
    run.summary.unlink()
    said = notes(page_of(run, out=tmp_path / "out"))
    assert set(said) == {
        "heldout", "learning", "timeline", "utilization", "deferrals", "control", "lengths", "bins", "memory", "samples",
    }  # fmt: skip
    assert "logging.trace=true" in said["timeline"] and "logging.rollouts=true" in said["samples"]


def test_a_run_without_a_step_and_one_of_sft(tmp_path: Path) -> None:
    fresh = write_run(tmp_path / "fresh", steps=0, finished=False, rollouts=False)
    sft = write_run(tmp_path / "sft", finished=False, rollouts=False)
    sft.metrics.write_text('{"step": 1, "time_s": 1.0, "step_s": 1.0, "loss": 2.0}\n')
    page = page_of(fresh, sft, out=tmp_path / "out")
    assert set(notes(page)) >= set(PARTS[1:]) - {"timeline"}
    assert "no step has ended yet" in section(page, "reward").text()
    assert embedded(page, "charts")["loss-steps"]["lines"][0]["ys"] == [2.0]


def test_settings_that_another_command_alone_has_are_no_difference(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, rollouts=False) for name in ("sft", "rm", "ppo")]
    common = {"seed": 1, "data": {"path": "rows.jsonl", "turns": "last"}}
    for run, own in zip(runs, ({"epochs": 3}, {"epochs": 1}, {"ppo": {"gamma": 1.0}, "seed": 2}), strict=True):
        run.config.write_text(yaml.safe_dump(common | own | {"run_dir": str(run.path)}))
    rows = section(page_of(*runs, out=tmp_path / "out"), "overview").all("tr")
    cells = {row.all("th")[0].text(): [cell.text() for cell in row.all("td")] for row in rows if row.all("td")}
    assert cells["epochs"] == ["3", "1", "–"] and cells["seed"] == ["1", "1", "2"]
    assert not {"ppo.gamma", "data.path", "data.turns", "run_dir"} & cells.keys()


def test_the_best_step_is_named(tmp_path: Path) -> None:
    overview = section(page_of(write_run(tmp_path / "run"), out=tmp_path / "out"), "overview").text()
    assert "best step, held out" in overview and "3 (pkg.judge:score 0.3)" in overview


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """Spans still lie in the ranks' files, and every file may end within a line."""
    run = write_run(tmp_path / "run", finished=False)
    for path in (run.metrics, run.rollouts, run.rank_trace(0)):
        with path.open("a") as file:
            file.write('{"step": 5, "tru')
    page = page_of(run, out=tmp_path / "out")
    assert "not finished" in section(page, "overview").text() and "best step" not in section(page, "overview").text()
    (timeline,) = embedded(page, "timelines")
    assert [step[0] for step in timeline["steps"]] == [1, 2, 3, 4]
    assert section(page, "samples").all("article")


def test_responses_to_read_are_those_that_are_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rollouts=False)
    rows = [rollout(4, k, "greedy" if k % 2 else "sampled") | {"greedy": bool(k % 2)} for k in range(6)]
    run.rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    responses = [pre.text() for pre in page_of(run, out=tmp_path / "out").all("pre", **{"class": "response"})]
    assert responses and set(responses) == {"sampled"}


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a<script>alert(1)</script>&amp;")
    bad = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[31m\u202e\ud800"
    run.rollouts.write_text("".join(json.dumps(rollout(step, k, bad)) + "\n" for step in (1, 4) for k in range(3)))
    append(run.metrics, {**metrics_line(5), "step": 5, "delta": 7, "delta_reason": bad})
    append(run.metrics, {**metrics_line(6), "step": 6})
    page = page_of(run, out=tmp_path / "out")
    assert len(page.all("script")) == 3 and not page.all("img") and not page.all("b", onerror="alert(2)")
    responses = [pre.text() for pre in page.all("pre", **{"class": "response"})]
    assert responses and all(text.startswith("</pre></script><script>alert(1)") for text in responses)
    assert not any(character in "".join(responses) for character in "\x00\x1b\u202e")
    assert embedded(page, "charts")["delta"]["lines"][0]["notes"][4].startswith("</pre></script>")


def test_timeline_data_are_the_spans_of_the_trace(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (timeline,) = embedded(page_of(run, out=tmp_path / "out"), "timelines")
    step, length, whole, flat = timeline["steps"][1]
    assert (step, length, whole) == (2, 2_000_000, 1)
    assert timeline["lanes"] == ["rank 0 · actor", "rank 1 · critic", "rank 1 · reward"]
    spans = [flat[k : k + 6] for k in range(0, len(flat), 6)]
    named = {(timeline["lanes"][s[0]], timeline["kinds"][s[1]][0], s[2], s[3], s[4]) for s in spans}
    assert ("rank 0 · actor", "decode", 0, 450_000, 0) in named
    assert ("rank 1 · critic", "update", 0, 200_000, 1) in named, "the update of step 1 that goes on in step 2"


def test_a_long_run_stays_small_and_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SPANS_OF_PAGE", 30_000)
    run = write_run(tmp_path / "run", steps=500, pieces=40)
    out = tmp_path / "out"
    write_report([run], out, [333], pictures=False)
    page = parse((out / "index.html").read_text())
    assert (out / "index.html").stat().st_size < 2e6
    (timeline,) = embedded(page, "timelines")
    assert [step[0] for step in timeline["steps"]] == list(range(1, 501)) and timeline["leftOut"] == 0
    whole = {step[0] for step in timeline["steps"] if step[2]}
    assert {1, 333, 500} <= whole and len(whole) < 20, "the others are thinned"
    for step, length, _, flat in timeline["steps"]:
        assert max(flat[k + 2] + flat[k + 3] for k in range(0, len(flat), 6)) <= length, step
        assert sum(flat[k + 5] for k in range(0, len(flat), 6)) >= 83, "merged spans are counted"
    assert len(section(page, "steps").all("figure")[1].all("rect")) <= 5 * 120

    monkeypatch.setattr(build, "SPANS_OF_PAGE", 3_000)
    page = page_of(run, out=out)
    (timeline,) = embedded(page, "timelines")
    assert timeline["leftOut"] > 0 and f"{timeline['leftOut']} of its steps are left out" in notes(page)["timeline"]


def test_windows_in_one_pass_are_those_one_by_one() -> None:
    spans = [span for step in range(1, 6) for span in step_spans(step, 3)]
    for window in all_windows(spans):
        alone = step_window("run", spans, window.step)
        assert (window.start, window.end) == (alone.start, alone.end)
        assert sorted(window.spans, key=str) == sorted(alone.spans, key=str)


def test_trace_is_in_the_trace_event_format(tmp_path: Path) -> None:
    """What Perfetto asks of its JSON input: complete events with numbers in microseconds, names for processes and threads."""
    trace = json.loads(write_run(tmp_path / "run").trace.read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named = {(e["name"], e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "M"}
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert complete and len(complete) + len(named) == len(trace["traceEvents"])
    for event in complete:
        assert isinstance(event["name"], str) and isinstance(event["cat"], str) and isinstance(event["args"], dict)
        assert (
            event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        )
        assert ("thread_name", event["pid"], event["tid"]) in named and ("process_name", event["pid"], 0) in named


def test_spans_are_the_same_before_and_after_the_merge(tmp_path: Path) -> None:
    going, ended = write_run(tmp_path / "going", finished=False), write_run(tmp_path / "ended")
    before, after = (sorted(read_spans(run), key=str) for run in (going, ended))
    assert [(s.rank, s.role, s.name, s.step) for s in before] == [(s.rank, s.role, s.name, s.step) for s in after]
    assert [s.start for s in before] == pytest.approx([s.start for s in after], abs=1e-6)


def test_runs_get_names_that_tell_them_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / seed / "oppo", rollouts=False) for seed in ("one", "two")]
    assert [record.name for record in read_runs([run.path for run in runs])] == ["one/oppo", "two/oppo"]
    assert distinct_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    with pytest.raises(DataError, match="given twice"):
        read_runs([runs[0].path, f"{runs[0].path}/."])


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("absent", "no such directory"),
        ("file", "a file; give the run_dir"),
        ("empty", "neither metrics.jsonl nor config.yaml"),
        ("parent", "it holds the runs inner: name those"),
        ("later", "format 99"),
        ("torn", "line 2"),
        ("stepless", "`step` is None"),
    ],
)
def test_what_is_no_run_directory(kind: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    for command in ("report", "watch"):
        assert main([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert told in error and "Traceback" not in error
    assert not (path / "report").exists()


def test_command_writes_the_page_and_the_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert main(["report", str(run.path)]) == 0
    out = run.path / "report"
    told = capsys.readouterr()
    assert str(out / "index.html") in told.out
    assert "oppo report: reading " in told.err and "oppo report: timeline and responses of " in told.err
    pictures = {path.stem for path in out.glob("*.png")}
    assert pictures == {
        "reward-steps", "reward-seconds", "steps-mean", "steps-0", "timeline", "utilization", "deferrals", "delta", "chunk",
        "lengths-0", "length-gap", "bins", "bins-0", "memory-0", "heldout-0", "heldout-1", *LEARNING,
    }  # fmt: skip
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert main(["report", str(run.path), "--step", "99", "--no-png"]) == 2
    assert "steps 1 to 4" in capsys.readouterr().err


def test_fields_of_another_kind_are_as_good_as_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    wrong = {"step": 3, "reward_mean": "high", "step_s": None, "deferred": [1], "memory_peak_mb": {}, "delta": True}
    append(run.metrics, wrong)
    append(run.metrics, {**metrics_line(4), "step": 4, "deferred": {"x": 1, "2": "y"}, "memory_peak_mb": ["a", None]})
    append(run.metrics, {**metrics_line(4), "step": 5, "reward_mean": float("nan"), "step_s": float("inf")})
    page_of(run, out=tmp_path / "out")
    assert read_run(run).column("reward_mean")[1][-1] is None and read_run(run).column("reward_mean")[1][2] is None
    assert main(["watch", str(run.path), "--once"]) == 0
    html = (tmp_path / "out" / "index.html").read_text()
    assert "NaN" not in html and "Infinity" not in html


def test_ticks_are_round_and_within() -> None:
    for low, high in ((0.0, 1.0), (-3.2, 17.0), (0.0, 1e-7), (99.0, 101.0), (0.0, 123456.0)):
        at = ticks(low, high)
        assert 3 <= len(at) <= 9 and low - 1e-9 <= at[0] and at[-1] <= high * (1 + 1e-9)
    assert extent([]) and extent([2.0])[0] < 2.0 < extent([2.0])[1]
    assert [short(value) for value in (0, 12, 1234.5, 0.12345, 1e-7, -4e9)] == [
        "0",
        "12",
        "1,234",
        "0.123",
        "1e-07",
        "-4e+09",
    ]


def test_gaps_within_groups_stand_beside_those_of_the_batch(tmp_path: Path) -> None:
    """In percent; a run without groups has none."""
    record = read_run(write_run(tmp_path / "run", steps=2).path)
    plain = replace(record, name="plain", lines=[line | {"group_length_gap": None} for line in record.lines])
    (chart,) = [each for each in length_section([record, plain]).charts if each.name == "length-gap"]
    assert isinstance(chart, LineChart)
    assert [(line.name, line.ys) for line in chart.lines] == [
        ("run", [20.0, 20.0]),
        ("run, within groups", [50.0, 50.0]),
        ("plain", [20.0, 20.0]),
    ]



def test_a_line_under_an_equal_one_is_seen() -> None:
    lines = [
        Line("a", [1, 2], [3.0, 3.0], "run0"),
        Line("b", [1, 2], [3.0, 4.0], "run1"),
        Line("c", [1, 2], [3.0, 3.0], "run2"),
    ]
    chart = LineChart("n", "t", "x", "y", lines)
    wide, other, top = chart.widths()
    assert wide > other == top and f"--width:{wide:g}" in chart_svg(chart)


def test_time_between_attempts_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    whole = read_run(run.path)
    raw = read_spans(run)
    later = [replace(s, start=s.start + 60, end=s.end + 60) if s.step > 2 else s for s in raw]
    ends = [time for s in without_downtime(later, whole.lines) for time in (s.start, s.end)]
    assert sorted(ends) == pytest.approx(sorted(time for s in whole.spans for time in (s.start, s.end)), abs=0.21)
    assert without_downtime(later, [{**line, "step_s": 61.0} for line in whole.lines]) == sorted(
        later, key=lambda s: s.start
    )
    assert without_downtime(later, whole.lines[:2]) == sorted(later, key=lambda s: s.start), "step 3 has no line yet"


def test_a_single_step(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", steps=1), out=tmp_path / "out")
    text = page.text()
    assert "Mean step" in text and "first step left out" not in text
    (chart,) = page.all("svg", id="chart-reward-seconds")
    assert all(not tick.text().startswith("-") for tick in chart.all("text")), "no time before the start"


def test_a_legend_fits_its_picture() -> None:
    parts = [label for label, _ in ALL_PARTS.values()]
    assert legend_columns(parts) == 3 and legend_columns(["a", "b"]) == 2 and legend_columns(["n" * 90] * 3) == 1


LEARNING = {
    "kl", "kl-coefficient", "entropy", "clip-fraction", "approx-kl", "actor-loss", "response-length", "truncated",
    "groups", "explained-variance", "value", "critic-loss", "critic-clip-fraction", "grad-norm", "lr",
}  # fmt: skip


def test_every_figure_of_learning_has_a_chart_that_says_what_is_healthy(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "first"), write_run(tmp_path / "second", steps=6), out=tmp_path / "out")
    charts = embedded(page, "charts")
    assert charts.keys() >= LEARNING
    assert [line["ys"][:2] for line in charts["kl"]["lines"]] == [[0.1, 0.2]] * 2
    for part in ("heldout", "learning"):
        for figure in section(page, part).all("figure"):
            (note,) = figure.all("p", **{"class": "note"})
            assert "Healthy" in note.text() or "schedule" in note.text() or "adaptive" in note.text()


def test_heldout_metrics_stand_over_the_steps_with_the_one_before_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    summary = json.loads(run.summary.read_text())
    before = {"mean": {"pkg.judge:score": 0.05}, "error": {"pkg.judge:score": 0.01}}
    write_json(run.summary, summary | {"heldout": {"0": before}})
    charts = embedded(page_of(run, out=tmp_path / "out"), "charts")
    (line,) = charts["heldout-0"]["lines"]
    assert line["xs"] == [0, 1, 2, 3, 4] and line["ys"][:2] == [0.05, 0.1]
    assert line["notes"][:2] == ["± 0.01", "± 0.02"]


def test_a_supervised_run_shows_its_own_figures(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "rm")
    run.path.mkdir()
    for step in (1, 2, 3):
        figures = {"loss": 0.7, "accuracy": 0.6, "margin": 0.1, "lr": 1e-4, "grad_norm": 1.0, "time_s": step}
        append(run.metrics, {"step": step, **figures, "heldout": {"loss": 0.69, "accuracy": 0.55}})
    charts = embedded(page_of(run, out=tmp_path / "out"), "charts")
    assert charts.keys() >= {"loss-steps", "pair-accuracy", "pair-margin", "grad-norm", "lr", "heldout-0", "heldout-1"}
    assert "kl" not in charts
