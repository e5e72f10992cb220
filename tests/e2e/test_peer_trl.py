"""The comparison with TRL's PPOTrainer and GRPOTrainer from end to end, where its environment has been made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.peers.comparison import PEER_PYTHON, main
from tests.support.ppo import Workspace

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / PEER_PYTHON).is_file(),
        reason=f"no {PEER_PYTHON}: `make bench-trl` creates it; TRL is installed for this comparison only",
    ),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trl_and_ours_do_the_same_work(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    out = tmp_path / "out"
    settings: dict[str, Any] = {
        "rewards": [{"kind": "model"}],
        "rollout.forced_lengths": [10, 0.8],
        "ppo.entropy_coefficient": 0.0,
        "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2},
        "runtime": {"device": "cpu"},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(Workspace.create(tmp_path).config("base", **settings)), encoding="utf-8")
    options = ["--threads", "1", "--placements", "single", "--modes", "sequential,full", "--dtype", dtype]
    options += ["--peer-python", str(ROOT / PEER_PYTHON), "--out", str(out)]
    assert main([str(config), *options]) == 0, capsys.readouterr().err

    printed, found = capsys.readouterr().out, json.loads((out / "trl.json").read_text())
    assert "equal work" in printed
    assert [row["run"] for row in found["results"]] == ["TRL", "single-sequential", "single-full"]
    work, (steps,) = json.loads((out / "work.json").read_text()), found["trl"]
    assert [length for step in steps for length in step["response_tokens"]] == work["lengths"]
    assert [step["ended_by_eos"] for step in steps] == [work["batch_size"]] * work["steps"]
    assert len({tuple(step["prompt_tokens"]) for step in steps}) == len(steps), "prompts differ in length"
    # The same weights score other samples: rewards are of the same size, not equal.
    first = found["ours"]["single-sequential"][0][0]
    assert abs(steps[0]["reward_mean"] - first["reward_mean"]) < 3 * first["reward_std"] + 0.1
    assert (out / "trl.png").is_file()


@pytest.mark.parametrize("kl", ["loss", "none"])
def test_trl_and_ours_train_groups_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str], kl: str) -> None:
    out = tmp_path / "out"
    settings: dict[str, Any] = {
        "algorithm": {"preset": "grpo"}, "critic": None, "reward": None, "runtime": {"device": "cpu"},
        "rewards": [{"kind": "verifier", "name": "length", "buffer_tokens": 12}], "rollout.forced_lengths": [10, 0.8],
        "rollout": {"batch_size": 8, "group_size": 4, "max_response_tokens": 24}, "ppo": {"kl": {"mode": kl}},
        "overlap.delta": {"rule": "fixed", "initial": 1, "max": 1},
    }  # fmt: skip
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(Workspace.create(tmp_path).config("base", **settings)), encoding="utf-8")
    options = ["--threads", "1", "--placements", "single", "--peer-python", str(ROOT / PEER_PYTHON), "--out", str(out)]
    assert main([str(config), *options, "--trl-micro-batch", "4"]) == 0, capsys.readouterr().err

    printed, found = capsys.readouterr().out, json.loads((out / "trl.json").read_text())
    assert f"KL: beta {0.04 if kl == 'loss' else 0:g} on both sides" in printed
    assert [row["run"] for row in found["results"]] == ["TRL", "single-sequential", "single-full"]
    work, (steps,) = json.loads((out / "work.json").read_text()), found["trl"]
    assert [length for step in steps for length in step["response_tokens"]] == work["lengths"]
    assert len({step["reward_mean"] for step in steps}) > 1 and all(step["score_s"] > 0 for step in steps)
    ours = found["ours"]["single-sequential"][0]
    assert [step["reward_mean"] for step in steps] == pytest.approx([line["reward_mean"] for line in ours], abs=1e-6)
