"""Jobs for the ranks of the contract test."""

import gc
import logging
import logging.handlers
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.aligner import shims

shims.install()  # before anything imports nemo: hence the imports below it

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from nemo_aligner.models.nlp.gpt.gpt_reward_model import GPTRewardModel
from omegaconf import OmegaConf
from pydantic import SecretStr

from oppo_megatron.errors import OppoError
from oppo_megatron.integrations.nemo_aligner.decoding import PooledActor
from oppo_megatron.integrations.nemo_aligner.pool import Pool, Row
from oppo_megatron.rewards.streaming import checksum
from oppo_megatron.serving.app import Known, Piece, build_stream_app
from tests.aligner.actor import start_megatron, weights
from tests.aligner.job import Job
from tests.aligner.world import PPOTrainer, build, callback_of, started
from tests.support.serving import served_app

gc.collect()
gc.freeze()  # NeMo-Aligner collects garbage in every phase: nemo's modules are none
TOKEN = "a-token-of-the-contract-test"


def run(job: Job) -> dict[str, Any]:
    trainer, given = build(job)
    trainer.fit()
    log = given["logger"]
    return {
        "trained": given["rm_critic"].trained, "rewards": given["rm_critic"].rewards, "endings": given["rm_critic"].endings,
        "inferred": given["model"].num_inferred, "weights": weights(given["model"]), "rollouts": log.of("train_rollouts/"),
        "optim": log.of("train_optim/"), "validation": log.of("val_rollouts/"), "step": trainer.step,
        "consumed": trainer.consumed_samples, "draw": torch.rand(1).item(),
    }  # fmt: skip


def refusal(job: Job, **changes: Any) -> str:
    given = dict(started(job))
    for name, value in changes.items():
        if name in given:
            given[name] = value
        else:
            OmegaConf.update(given["cfg"], name, value)
    try:
        PPOTrainer(**given)
    except OppoError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def told(job: Job, **changes: Any) -> str:
    warnings = logging.handlers.BufferingHandler(100)
    warnings.setLevel(logging.WARNING)
    logging.getLogger("nemo_logger").addHandler(warnings)
    try:
        build(job, **changes)
    except OppoError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("nemo_logger").removeHandler(warnings)
    return "taken" + "".join(f", {record.getMessage()}" for record in warnings.buffer)


def untouched(job: Job) -> list[bool]:
    """Whether a trainer that is resumed has what its script has passed in its places; the model is attached to no trainer."""
    trainer, given = build(job)
    given["model"]._trainer = None
    trainer.load_state_dict(trainer.state_dict())
    return [getattr(trainer, name) is given[name] for name in ("model", "rm_critic", "batch_iterator_cls")]


def rows_left(job: Job) -> list[list[int]]:
    """Answers of two of three carried rows after a wave: one has begun when the third ends, one's context is longer."""
    model = started(job)["model"]
    model.prepare_for_inference()
    pool = Pool(max_staleness=4)
    pool.restore([Row(0, [4], [20] * 11), Row(1, [4] * 6, [21] * 5), Row(2, [4] * 8, [22] * 8)], next_key=3)
    pool.begin(batch=1, width=3)
    actor = PooledActor(model, pool, None)
    actor.pooled = True
    assert actor.infer({"count": torch.tensor(1)})["response_lengths"].tolist() == [1 + job.max_length]
    return [row.tokens for row in pool.rows]


def topk_of_next_run(job: Job) -> tuple[list[str], list[str]]:
    """The names of the checkpoints of a run that NeMo's callback of the next one finds: to rank them, and to thin them out."""
    callback = callback_of(job.folder, n_resume=True)
    listed = callback._get_checkpoints_list(str(job.folder / "checkpoints" / "next"))
    return sorted(Path(path).name for path in callback.best_k_models), [Path(path).name for path in listed]


def load_reward_model(weights: str, sizes: Mapping[str, int], tied: bool) -> dict[str, torch.Tensor]:
    start_megatron(1, 1, 0)
    config = TransformerConfig(
        num_layers=sizes["num_hidden_layers"], hidden_size=sizes["hidden_size"], ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"], num_query_groups=sizes["num_key_value_heads"],
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        use_cpu_initialization=True, masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model = GPTRewardModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=sizes["vocab_size"], max_sequence_length=64,
        position_embedding_type="rope", share_embeddings_and_output_weights=tied, head_dtype=torch.float32,
    )  # fmt: skip
    asked = {key: part for key, part in model.sharded_state_dict("model.").items() if "_extra_state" not in key}
    return dict(dist_checkpointing.load(asked, weights))


class Recorder:
    """A scorer without a model: the score of `world.Critic`, and what it was sent.  Forgets as `StreamScorer` does."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.pieces: list[tuple[int, int, bool]] = []

    def extend(self, session: str, pieces: Sequence[Piece]) -> list[Known]:
        return [self._take(piece) for piece in pieces]

    def _take(self, piece: Piece) -> Known:
        self.pieces.append((piece.id, len(piece.tokens), piece.final))
        held = self.tokens.setdefault(piece.id, [])
        assert piece.offset == len(held), "no token is sent twice"
        held += piece.tokens
        if (piece.final and not piece.tokens) or checksum(held) != piece.checksum:
            held.clear()  # what came before is no part of the sequence: again, from its start
            return Known(id=piece.id, known=0)
        if not piece.final:
            return Known(id=piece.id, known=len(held))
        even = torch.tensor(float(sum(token % 2 == 0 for token in held)))
        return Known(id=piece.id, known=len(held), score=float(even / len(held)))


def run_streamed(job: Job) -> dict[str, Any]:
    os.environ["ALIGNER_TEST_TOKEN"] = TOKEN
    recorder = Recorder()
    with served_app(build_stream_app(recorder.extend, SecretStr(TOKEN))) as url:
        block = {**(job.oppo or {}), "scorer": {"url": url, "token_env": "ALIGNER_TEST_TOKEN"}}
        done = run(replace(job, oppo=block))
    return done | {"pieces": recorder.pieces, "lengths": {i: len(t) for i, t in recorder.tokens.items()}}


def run_failing(job: Job) -> str:
    trainer, _ = build(job)
    try:
        trainer.fit()
    except OppoError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def run_refused(job: Job, rank: int) -> str:
    token = TOKEN if torch.distributed.get_rank() != rank else "another-token-of-the-test"
    with served_app(build_stream_app(Recorder().extend, SecretStr(token))) as url:
        os.environ["ALIGNER_TEST_TOKEN"] = TOKEN
        block = {**(job.oppo or {}), "scorer": {"url": url, "token_env": "ALIGNER_TEST_TOKEN"}}
        return run_failing(replace(job, oppo=block))
