"""The overlap benchmark's arithmetic, on made-up metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.random_prompts import write_random_prompts
from oppo_megatron.data.tokenizer import SentencePieceTokenizer
from oppo_megatron.train.bench_overlap import MODES, compare, figures, mode_config


def line(step_s: float, busy: float = 2.0, exposed: float = 1.0, tokens: int = 100) -> dict[str, Any]:
    return {
        "step_s": step_s, "decode_s": 1.0, "score_exposed_s": exposed, "score_busy_s": busy, "train_s": 0.5,
        "idle_s": {"actor": 0.1, "scorer": 0.2}, "tokens": tokens,
    }  # fmt: skip


def config() -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "run_dir": "runs/x",
            "tokenizer": {"path": "t.model"},
            "data": {"path": "p.jsonl"},
            "actor": {"init": {}},
            "critic": {"init": {}},
            "rewards": [{"kind": "model"}],
            "rollout": {"batch_size": 4, "max_response_tokens": 8},
        }
    )


def test_figures_leave_out_the_first_step_but_in_the_total() -> None:
    result = figures([[line(100.0, exposed=2.0), line(2.0), line(4.0, exposed=0.5)], [line(90.0), line(3.0)]])
    assert result["step_s"] == 3.0
    assert result["total_s"] == pytest.approx((106.0 + 93.0) / 2)
    assert result["hidden_percent"] == pytest.approx(100 * (1 - 2.5 / 6))
    assert result["tokens_per_s"] == pytest.approx(300 / 9)
    assert result["idle_actor_s"] == 0.1 and result["idle_scorer_s"] == 0.2


def test_modes_are_the_two_switches_and_nothing_else() -> None:
    base = config()
    for mode, switches in MODES.items():
        changed = mode_config(base, switches, Path("runs") / mode, actions=False)
        assert {name: getattr(changed.overlap, name) for name in ("intra", "inter")} == switches
        assert changed.run_dir == Path("runs") / mode
        same = changed.model_copy(update={"run_dir": base.run_dir, "overlap": base.overlap})
        assert same == base


def test_speed_up_is_against_sequential(tmp_path: Path) -> None:
    runs = {}
    for mode, seconds in {"sequential": 4.0, "full": 2.0}.items():
        runs[mode] = [tmp_path / mode]
        runs[mode][0].mkdir()
        text = "".join(json.dumps(line(s)) + "\n" for s in (seconds + 4, seconds, seconds))
        (runs[mode][0] / "metrics.jsonl").write_text(text)
    rows = {row["mode"]: row for row in compare(config(), runs)["results"]}
    assert rows["full"]["speedup_step_s"] == 2.0
    assert rows["full"]["speedup_total_s"] == pytest.approx(16 / 10)
    assert rows["sequential"]["speedup_step_s"] == 1.0
    alone = compare(config(), {"full": runs["full"]})["results"][0]
    assert alone["speedup_step_s"] is None


@pytest.mark.parametrize("length", [1, 64])
def test_random_prompts_have_the_length_asked_for(tmp_path: Path, length: int) -> None:
    path, rows = write_random_prompts(tmp_path, length)
    tokenizer = SentencePieceTokenizer(path, None)
    prompts = [json.loads(row)["prompt"] for row in rows.read_text().splitlines()]
    assert len(set(map(len, prompts))) == 1 and len(prompts) > 500
    assert all(len(tokenizer.encode(prompt)) == length for prompt in prompts[:50])
