"""The same code on a CUDA device: `make gpu-test`.  Each test's body takes the device, so that it can be tried on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oppo_megatron.config.model import ModelConfig, RuntimeConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.runtime.mcore.attention import PackedPlan
from oppo_megatron.runtime.mcore.groups import build_groups
from oppo_megatron.runtime.mcore.stage import step
from oppo_megatron.runtime.roles import load_role
from oppo_megatron.runtime.sampler import Sampling, draw
from oppo_megatron.runtime.world import open_world
from oppo_megatron.train.entry import run_ppo
from oppo_megatron.train.setup import read_inputs
from tests.support.ppo import SHAPE, Outcome, Workspace, read_outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run on a machine that has one"),
]


def test_cached_steps_equal_the_full_forward() -> None:
    check_cached_steps("cuda")


def test_draws_never_leave_the_support() -> None:
    check_draws("cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ppo_in_one_process(tmp_path: Path, dtype: str) -> None:
    check_ppo(tmp_path, "cuda", dtype)


def test_streams_side_by_side_change_nothing(tmp_path: Path) -> None:
    check_streams(tmp_path, "cuda")


def check_cached_steps(device: str) -> None:
    with open_world(RuntimeConfig(device=device)) as world:  # type: ignore[arg-type]
        groups = build_groups([0], 1, 1, "actor")
        assert groups is not None
        model = load_role(ModelConfig(init=SHAPE), groups, head="lm", max_length=64, device=world.device)
        tokens_T = torch.randint(0, 288, (50,), device=world.device)
        with torch.no_grad():
            full_TV = model(tokens_T, PackedPlan([50], model.rope))
        kv = model.new_cache(num_slots=2)
        kv.open(0)
        pieces = [step(model, kv, [0], [len(chunk)], chunk) for chunk in tokens_T.split([20, 1, 1, 7, 21])]
        assert float((torch.cat(pieces) - full_TV).abs().max()) < 1e-4 * float(full_TV.abs().max())


def check_draws(device: str) -> None:
    """A cumulative sum in float32 may round: still no token of probability 0 is drawn, and the log-probs are the row's."""
    logits_RV = torch.randn(64, 5000, device=device).masked_fill_(torch.rand(64, 5000, device=device) < 0.5, -torch.inf)
    for position in range(50):
        drawn = draw(logits_RV, Sampling(seed=3), range(64), [position] * 64)
        assert bool(drawn.logprobs.isfinite().all())
        expected_R = logits_RV.log_softmax(-1).gather(-1, drawn.tokens[:, None])[:, 0]
        assert float((drawn.logprobs - expected_R).abs().max()) < 1e-4


def check_ppo(root: Path, device: str, dtype: str) -> None:
    changes: dict[str, Any] = {f"{role}.dtype": dtype for role in ("actor", "critic", "reward")}
    if dtype == "float32":
        changes["ppo.logprob_gap_limit"] = 1e-3
    config = TrainConfig(
        **Workspace.create(root).config("cuda", **{"runtime.device": device, "overlap.intra": True}, **changes)
    )
    outcome = _run(config, device)
    assert len(outcome.rollouts) == 18
    assert max(line["logprob_gap"] for line in outcome.metrics) < (1e-3 if dtype == "float32" else 0.5)


def check_streams(root: Path, device: str) -> None:
    """Scoring on streams of its own, beside the decoding, against scoring after it: the same tokens and scores."""
    workspace, outcomes = Workspace.create(root), []
    for intra in (False, True):
        changes = {"runtime.device": device, "overlap.intra": intra, "steps": 1, "ppo.logprob_gap_limit": 1e-3}
        outcomes.append(_run(TrainConfig(**workspace.config(f"intra-{intra}", **changes)), device))
    after, beside = outcomes
    assert beside.tokens() == after.tokens()
    for name in ("reward_mean", "kl_mean", "value_mean"):
        assert beside.metrics[0][name] == pytest.approx(after.metrics[0][name], abs=1e-3)


def _run(config: TrainConfig, device: str) -> Outcome:
    with open_world(config.runtime) as world:
        assert world.device.type == device and not dist.get_rank()
        run_ppo(config, world, read_inputs(config))
    return read_outcome(config.run_dir)
