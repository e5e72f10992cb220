"""Jobs for the ranks of the contract test."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.aligner import shims

shims.install()  # before anything imports nemo: hence the imports below it

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from nemo_aligner.models.nlp.gpt.gpt_reward_model import GPTRewardModel
from pydantic import SecretStr

from oppo_megatron.errors import OppoError
from oppo_megatron.serving.stream_app import Known, Piece, build_stream_app
from tests.aligner.actor import start_megatron, weights
from tests.aligner.job import Job
from tests.aligner.world import build
from tests.support.serving import served_app

gc.collect()
gc.freeze()  # NeMo-Aligner collects garbage in every phase: nemo's modules are none
TOKEN = "a-token-of-the-contract-test"


def run(job: Job) -> dict[str, Any]:
    """One run on this rank: what was trained, logged, and is left."""
    trainer, given = build(job)
    trainer.fit()
    log = given["logger"]
    return {
        "trained": given["rm_critic"].trained,
        "weights": weights(given["model"]),
        "rollouts": log.of("train_rollouts/"),
        "optim": log.of("train_optim/"),
        "validation": log.of("val_rollouts/"),
        "step": trainer.step,
        "consumed": trainer.consumed_samples,
        "draw": torch.rand(1).item(),
    }


def refusal(job: Job, **changes: Any) -> str:
    """What the trainer says of a job that it does not take."""
    from omegaconf import OmegaConf

    from tests.aligner import world

    given = dict(world.started(job))
    for name, value in changes.items():
        if name in given:
            given[name] = value
        else:
            OmegaConf.update(given["cfg"], name, value)
    try:
        world.PPOTrainer(**given)
    except OppoError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def refused_resume(job: Job) -> str:
    """What a resume says that cannot be."""
    try:
        build(job)
    except OppoError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def load_reward_model(weights: str, sizes: Mapping[str, int], tied: bool) -> dict[str, torch.Tensor]:
    """What NeMo-Aligner's own reward model finds in a folder `model_weights`."""
    start_megatron(1, 1, 0)
    config = TransformerConfig(
        num_layers=sizes["num_hidden_layers"], hidden_size=sizes["hidden_size"], ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"], num_query_groups=sizes["num_key_value_heads"],
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        use_cpu_initialization=True, masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model = GPTRewardModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=sizes["vocab_size"],
        max_sequence_length=64, position_embedding_type="rope", share_embeddings_and_output_weights=tied,
        head_dtype=torch.float32,
    )  # fmt: skip
    asked = {key: part for key, part in model.sharded_state_dict("model.").items() if "_extra_state" not in key}
    return dict(dist_checkpointing.load(asked, weights))


class Recorder:
    """A scorer without a model: the score of `world.Critic`, and what it was sent."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.pieces: list[tuple[int, int, bool]] = []
        self.lost = 0

    def extend(self, session: str, pieces: Sequence[Piece]) -> list[Known]:
        return [self._take(piece) for piece in pieces]

    def _take(self, piece: Piece) -> Known:
        self.pieces.append((piece.id, len(piece.tokens), piece.final))
        held = self.tokens.setdefault(piece.id, [])
        assert piece.offset == len(held), "no token is sent twice"
        held += piece.tokens
        if not piece.final:
            return Known(id=piece.id, known=len(held))
        even = torch.tensor(float(sum(token % 2 == 0 for token in held)))
        return Known(id=piece.id, known=len(held), score=float(even / len(held)))


def run_streamed(job: Job) -> dict[str, Any]:
    """As `run`, with rewards that are streamed to a service."""
    os.environ["ALIGNER_TEST_TOKEN"] = TOKEN
    recorder = Recorder()
    with served_app(build_stream_app(recorder.extend, SecretStr(TOKEN))) as url:
        block = {**(job.oppo or {}), "scorer": {"url": url, "token_env": "ALIGNER_TEST_TOKEN"}}
        done = run(replace(job, oppo=block))
    return done | {"pieces": recorder.pieces, "lengths": {i: len(t) for i, t in recorder.tokens.items()}}
