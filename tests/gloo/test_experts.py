"""Experts that drew a token are used again in training: against transformers with these experts, and in bfloat16."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from oppo_megatron.config.model import ModelConfig, TrainingLayoutConfig
from oppo_megatron.engine import round_runner
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.layout.experts import Experts
from oppo_megatron.mcore.batch import join_rows, pack_responses
from oppo_megatron.mcore.experts import ANY, replay
from oppo_megatron.mcore.roles import load_role, load_training
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.mcore.weights.hf_source import read_shape
from oppo_megatron.records import Prompt, Rollout
from tests.gloo.models import CPU, save_small, world_groups
from tests.gloo.test_generation import Variant, decode_round, finish, new_rounds
from tests.support.ranks import run_ranks

LENGTH, MAX_LENGTH = 24, 40
JOB = "tests.gloo.test_experts:drawn_and_trained"


def drawn_and_trained(
    directory: str, trained: str, tp: int, pp: int, num_prompts: int, sync_steps: int = 1, dtype: str = "float32",
    carried: int = 0, ep: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Rollouts by `directory`, and log-probs by `trained` without and with the experts that drew them.

    With `ep`, the ranks of decoding are replicas then that divide the experts.  After `carried` tokens, `trained` draws the
    others.
    """
    groups = world_groups(tp, pp)
    config, sizes = ModelConfig(checkpoint=Path(directory), dtype=dtype), {"max_length": MAX_LENGTH, "device": CPU}
    model = load_role(config, groups, head="lm", **sizes)
    dice = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 64, (2 + i % 7,), generator=dice).tolist() for i in range(num_prompts)]
    rollouts = {i: Rollout(Prompt(i, i, "", tuple(tokens)), i) for i, tokens in enumerate(prompts)}
    with mock.patch.object(round_runner, "DecodeWorker", partial(DecodeWorker, keep_routes=True)):
        cache = model.new_cache(num_prompts)
        rounds = new_rounds(model, cache, Sampling(seed=3), Stopping((), LENGTH), tokens=64, sync_steps=sync_steps)
    if carried:
        decode_round(rounds, list(rollouts.values()), carried, 0, 0)
        config = ModelConfig(checkpoint=Path(trained), dtype=dtype)
        model.begin_weight_update()
        model.load_state_dict(load_role(config, groups, head="lm", **sizes).state_dict())
        model.end_weight_update()
        rounds.actor_changed()
    finish(rounds, rollouts, Variant(max_steps=9))
    layout = TrainingLayoutConfig(sequence_parallel=True, ep=ep)
    groups = groups if ep == 1 else world_groups(1, 1, ep=ep)
    config = ModelConfig(checkpoint=Path(trained), dtype=dtype)
    chunks = load_training(config, layout, groups, head="lm", **sizes)
    responses = [r.tokens for r in rollouts.values()]
    found: dict[str, Any] = {"rollouts": [(r.prompt.tokens, r.tokens, r.logprobs, r.routes) for r in rollouts.values()]}
    for way in ("free", "replayed"):
        batches = pack_responses(prompts, responses, 100, CPU)
        for batch in batches if way == "replayed" else ():
            batch.routes = [route for i in batch.index for route in rollouts[i].routes]
        if ep > 1 and way == "free" and groups.dp_rank == 0:  # computes the other's experts without rows of its own
            batches = []
        out = forward_rows(chunks, batches, lambda b, x: x.figures(b.targets_R).logp_R)
        if groups.is_last_stage and batches:
            found[way] = join_rows(out, list(map(len, responses)), batches)
    return found


def router(layer: Any) -> Any:
    return layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate


def force(model: Any, given_TLK: Tensor) -> None:
    """Let transformers' routers choose the experts in `given_TLK`."""
    for number, layer in enumerate(model.model.layers):
        gate, experts = router(layer), Experts(6, given_TLK.shape[2], 24, True)

        def routed(hidden: Tensor, gate: Any = gate, number: int = number, experts: Experts = experts) -> Any:
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight, getattr(gate, "bias", None))
            table = torch.softmax(logits, -1)
            free = torch.topk(table, experts.active).indices
            chosen = torch.where(given_TLK[:, number] == ANY, free, given_TLK[:, number].long())
            weights = table.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        gate.forward = routed


@pytest.mark.parametrize(("family", "tp", "pp", "sync_steps", "ep"), [
    ("qwen3_moe", 1, 1, 4, 1), ("qwen3_moe", 2, 2, 1, 1), ("qwen3_moe", 2, 1, 4, 2), ("gpt_oss", 1, 1, 4, 1),
    pytest.param("gpt_oss", 2, 2, 1, 1, marks=pytest.mark.long),
    pytest.param("gpt_oss", 2, 1, 1, 2, marks=pytest.mark.long),
])  # fmt: skip
def test_training_takes_the_experts_of_decoding(tmp_path: Path, family: str, tp: int, pp: int, sync_steps: int, ep: int) -> None:
    """By other weights, which would choose others, as after an update."""
    shape = {"num_experts": 6}
    save_small(tmp_path / "drawing", family, **shape)
    save_small(tmp_path / "trained", family, **shape, seed=1)
    where = {"directory": str(tmp_path / "drawing"), "trained": str(tmp_path / "trained"), "tp": tp, "pp": pp}
    answers = run_ranks(tp * pp, JOB, **where, num_prompts=6, sync_steps=sync_steps, ep=ep)
    answer = answers[-1]
    assert all(each["rollouts"] == answer["rollouts"] for each in answers), "every rank knows all routes"
    drawing, trained = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("drawing", "trained")
    )
    free, replayed = list[float](), list[float]()
    for prompt, tokens, logprobs, routes in answer["rollouts"]:
        ids = torch.tensor([[*prompt, *tokens]])
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        given = replay(routes, rows, ids.shape[1], read_shape(tmp_path / "drawing")).given
        assert given is not None
        with torch.no_grad():
            asked: list[Tensor] = []
            hooks = [
                router(layer).register_forward_hook(lambda _, __, out, a=asked: a.append(out[2]))
                for layer in drawing.model.layers
            ]
            drawn = drawing(ids).logits[0].log_softmax(-1)
            [hook.remove() for hook in hooks]
            assert drawn[rows, ids[0, rows + 1]].tolist() == pytest.approx(logprobs, abs=1e-4)
            chosen = torch.stack(asked, 1)[rows]
            assert torch.equal(given[rows].long().sort(-1).values, chosen.sort(-1).values), "what the drawing model chose"
            plain = trained(ids).logits[0].log_softmax(-1)
            free += plain[rows, ids[0, rows + 1]].tolist()
            before = [router(layer).forward for layer in trained.model.layers]
            force(trained, given)
            replayed += trained(ids).logits[0].log_softmax(-1)[rows, ids[0, rows + 1]].tolist()
            for layer, forward in zip(trained.model.layers, before, strict=True):
                router(layer).forward = forward
    assert answer["free"].tolist() == pytest.approx(free, abs=1e-4)
    assert answer["replayed"].tolist() == pytest.approx(replayed, abs=1e-4)
    assert (answer["replayed"] - answer["free"]).abs().max() > 0.05, "the routers of other weights choose other experts"


def test_a_carried_response_takes_its_experts_again_when_its_cache_is_recomputed(tmp_path: Path) -> None:
    """As in training, so that tokens drawn after an update have the same log-probs in both."""
    save_small(tmp_path / "drawing", "qwen3_moe", num_experts=6)
    save_small(tmp_path / "trained", "qwen3_moe", num_experts=6, seed=1)
    where = {"directory": str(tmp_path / "drawing"), "trained": str(tmp_path / "trained"), "tp": 1, "pp": 2}
    answer = run_ranks(2, JOB, **where, num_prompts=6, carried=9)[-1]
    later = torch.tensor([place >= 9 for _, tokens, _, _ in answer["rollouts"] for place in range(len(tokens))])
    drawn = torch.tensor([x for _, _, logprobs, _ in answer["rollouts"] for x in logprobs])
    assert answer["replayed"][later].tolist() == pytest.approx(drawn[later].tolist(), abs=1e-4)
    assert (answer["free"] - drawn)[later].abs().max() > 0.05, "the routers of other weights choose other experts"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_in_bfloat16_log_probs_are_nearer_with_the_experts_of_decoding(tmp_path: Path, family: str) -> None:
    save_small(tmp_path, family, num_hidden_layers=6, num_local_experts=8)
    where = {"directory": str(tmp_path), "trained": str(tmp_path), "tp": 1, "pp": 1, "dtype": "bfloat16"}
    (answer,) = run_ranks(1, JOB, **where, num_prompts=32)
    drawn = torch.tensor([x for _, _, logprobs, _ in answer["rollouts"] for x in logprobs])
    free, replayed = ((answer[way] - drawn).abs() for way in ("free", "replayed"))
    print(family, [(x.mean().item(), x.quantile(0.99).item(), x.max().item()) for x in (free, replayed)])
    assert replayed.mean() < free.mean() and replayed.quantile(0.99) < 0.8 * free.quantile(0.99)
