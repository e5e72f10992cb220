"""Runs of models with a sliding window: decoding, scoring and training agree, in dense and paged caches and on other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tests.support.layouts import DEEP, STEADY_ADAM, assert_same, deep
from tests.support.ppo import Workspace, run_ppo_ranks

WINDOW = 12
MISTRAL = DEEP | {"model_type": "mistral", "sliding_window": WINDOW}
SOME_LAYERS = DEEP | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
ROLES: dict[str, Any] = {
    "actor": {"init": MISTRAL, "optimizer": STEADY_ADAM},
    "critic": {"init": SOME_LAYERS, "init_seed": 5, "optimizer": STEADY_ADAM},
    "reward": {"init": MISTRAL, "init_seed": 6},
}


def test_layouts_and_caches_are_the_plain_run(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    plain = run_ppo_ranks(deep(workspace, "plain") | ROLES)
    assert max(len(tokens) for tokens in plain.tokens().values()) > WINDOW
    placement = {"mode": "disaggregated", "actor": {"tp": 2}, "scorer": {"pp": 2}}
    over = {"overlap.intra": True, "runtime.kv_layout": "paged"}
    assert_same(run_ppo_ranks(deep(workspace, "paged", placement=placement, **over) | ROLES), plain)
    written = AutoConfig.from_pretrained(tmp_path / "runs" / "paged" / "weights" / "actor")
    assert written.architectures == ["MistralForCausalLM"] and written.sliding_window == WINDOW
