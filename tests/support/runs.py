"""Run directories as a run writes them, without a run, and a reader of HTML."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from oppo_megatron.rundir.directory import RUN_FORMAT, RunDirectory, encode_json, write_json
from oppo_megatron.rundir.metrics_log import MetricsLog, summarise
from oppo_megatron.rundir.trace import Span, SpanRecorder, merge_traces

BEST = {"best": {"step": 3, "metric": "pkg.judge:score", "value": 0.3}}


def metrics_line(step: int) -> dict[str, Any]:
    delta = 4 if step < 3 else 5
    return {
        "time_s": 2.0 * step, "step_s": 2.0, "decode_s": 1.0, "score_exposed_s": 0.25, "score_busy_s": 0.5, "train_s": 0.5,
        "critic_exposed_s": 0.05, "bubble_share": 0.1, "tokens": 100, "reward_mean": 0.1 * step, "delta": delta,
        "delta_reason": f"step {step}: the reward improves <b>much</b>", "chunk_tokens": 16,
        "chunk_reason": f"step {step}: chunk is fixed at 16", "deferred": {"0": 6, "1": 2}, "trained_len_mean": 20.0,
        "submitted_len_mean": 25.0, "trained_len_max": 40, "length_gap": 0.2, "group_length_gap": 0.5,
        "memory_peak_mb": [100.0, 200.0 + step],
        "length_by_quarter": {f"q{k}": 10.0 * k for k in range(1, 5)},
        "reward_by_quarter": {f"q{k}": 0.5 - 0.1 * k for k in range(1, 5)},
        "kl_mean": 0.1 * step, "kl_coefficient": 0.05, "entropy": 2.0 - 0.1 * step, "clip_fraction": 0.1, "approx_kl": 0.01,
        "actor_loss": -0.01, "truncated_fraction": 0.1, "explained_variance": 0.2, "value_mean": 0.1, "return_mean": 0.2,
        "critic_loss": 0.5, "critic_clip_fraction": 0.1, "grad_norm": 1.0, "critic_grad_norm": 2.0, "lr": 1e-5,
        "keep_rate": 0.5 + 0.1 * step, "equal_groups": 0.1,
        "heldout": {"pkg.judge:score": 0.1 * step, "response_tokens": 30.0}, "heldout_error": {"pkg.judge:score": 0.02},
    }  # fmt: skip


def step_spans(step: int, pieces: int = 2) -> list[Span]:
    start, length = 2.0 * (step - 1), 1.0 / pieces
    spans = [
        Span(0, "actor", "update", step, start + 1.5, start + 2.0),
        Span(1, "critic", "update", step, start + 1.5, start + 2.2),
    ]
    spans.append(Span(0, "actor", "wait_scores", step, start + 1.0, start + 1.5))
    for piece in range(pieces):
        at = start + piece * length
        spans.append(Span(0, "actor", "decode", step, at, at + 0.9 * length))
        spans.append(Span(1, "reward", "score", step, at + 0.5 * length, at + length))
    return spans


def write_run(path: Path, steps: int = 4, *, pieces: int = 2, finished: bool = True, rollouts: bool = True) -> RunDirectory:
    run = RunDirectory(path)
    run.path.mkdir(parents=True)
    run.config.write_text(yaml.safe_dump({"run_dir": str(path), "steps": steps, "rollout": {"batch_size": 8}}))
    write_json(run.hosts, {"format": RUN_FORMAT, "ranks": []})
    lines = [metrics_line(step) for step in range(1, steps + 1)]
    with MetricsLog(run.metrics) as log:
        for step, line in enumerate(lines, start=1):
            log.write(step, line)
    recorders = [SpanRecorder(rank, run) for rank in range(2)]
    for step in range(1, steps + 1):
        for span in step_spans(step, pieces):
            recorders[span.rank].write(span)
    for recorder in recorders:
        recorder.flush()
    if rollouts:
        rows = [rollout(step, number) for step in range(1, steps + 1) for number in range(4)]
        run.rollouts.write_text("".join(encode_json(row) + "\n" for row in rows))
    if finished:
        merge_traces(run)
        memory = {"memory_base_mb": [50.0, 50.0], "memory_peak_mb": [100.0, 204.0], "memory_planned_mb": [60.0, 150.0]}
        write_json(run.summary, {**summarise(lines), **memory, "memory_ratio": [0.83, 1.03], "total_s": 2.0 * steps, **BEST})
    return run


def rollout(step: int, number: int, response: str = "the answer is 4") -> dict[str, Any]:
    return {
        "step": step, "seq_id": 10 * step + number, "prompt": "2+2=", "response": response, "reward": 0.25 * number,
        "tokens": [1, 2, 3], "logprobs": [-1.0] * 3, "versions": [0] * 3, "deferrals": number % 2, "finish_clock": 9,
        "finish_reason": "eos",
    }  # fmt: skip


def append(path: Path, value: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """The elements below of this tag with these attributes, in the order of the page."""
        found = []
        for child in self.children:
            if child.tag == tag and all(child.attributes.get(key) == value for key, value in attributes.items()):
                found.append(child)
            found += child.all(tag, **attributes)
        return found

    def text(self) -> str:
        return " ".join([*self.texts, *(child.text() for child in self.children)])


class _Parser(HTMLParser):
    """Fails on a tag that is not closed, or closed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.path = [Element("page", {})]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attributes})
        self.path[-1].children.append(element)
        if tag not in VOID:
            self.path.append(element)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.path[-1].children.append(Element(tag, {key: value or "" for key, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.path.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, text: str) -> None:
        if text.strip():
            self.path[-1].texts.append(text)


def parse(html: str) -> Element:
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert len(parser.path) == 1, f"{[element.tag for element in parser.path[1:]]} are not closed"
    return parser.path[0]
