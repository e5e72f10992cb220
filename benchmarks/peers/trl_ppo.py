"""TRL's PPOTrainer: its construction, and the calls at which one of its steps changes phase.

Legend: B rows, P prompt tokens, L response tokens of the longest row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.peers.trl_common import Batch, Clock, build_tokenizer, run_settings

METRICS = {"reward_mean": "objective/scores", "actor_loss": "loss/policy_avg", "critic_loss": "loss/value_avg"}
"""Ours by TRL's."""


def build_trainer(work: Mapping[str, Any]) -> Any:
    """TRL's PPOTrainer over the models, prompts and settings of the work."""
    import torch
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOTrainer

    def load(role: str, kind: Any) -> Any:
        return kind.from_pretrained(work["models"][role], dtype=torch.float32, local_files_only=True)

    policy = load("actor", AutoModelForCausalLM)
    tokenizer = build_tokenizer(policy.config.vocab_size, work["eos_id"], work["pad_id"])
    policy.generation_config.pad_token_id = work["pad_id"]
    prompts = Dataset.from_dict({"input_ids": work["prompts"]})
    trainer = PPOTrainer(
        args=ppo_config(work),
        processing_class=tokenizer,
        model=policy,
        ref_model=load("reference", AutoModelForCausalLM),
        reward_model=load("reward", AutoModelForSequenceClassification),
        value_model=load("critic", AutoModelForSequenceClassification),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(1)),  # asked for, never read
    )
    in_order = DataLoader(prompts, batch_size=work["batch_size"], collate_fn=trainer.data_collator, drop_last=True)
    trainer.dataloader = trainer.accelerator.prepare(in_order)
    return trainer


def ppo_config(work: Mapping[str, Any]) -> Any:
    """TRL's settings: the whole batch is scored at once."""
    from trl.experimental.ppo import PPOConfig

    batch = work["batch_size"]
    return PPOConfig(
        **run_settings(work),
        **work["ppo"],
        bf16=False,
        total_episodes=work["steps"] * batch,
        local_rollout_forward_batch_size=batch,
        response_length=work["max_response_tokens"],
        stop_token="eos",  # noqa: S106  (a token of the vocabulary)
        num_sample_generations=0,
    )


@contextlib.contextmanager
def watched(
    trainer: Any, clock: Clock, autocast: Callable[[], contextlib.AbstractContextManager[Any]], generated: Callable[[Any], None]
) -> Iterator[None]:
    """TRL's functions of generation and scoring, as the trainer's module knows them, with the clock and autocast around.

    `generated` is given queries and responses of each batch.
    """
    from trl.experimental.ppo import ppo_trainer as module

    trained = trainer.model
    original = {name: getattr(module, name) for name in ("batch_generation", "forward", "get_reward")}

    def batch_generation(model: Any, queries: Any, *rest: Any) -> Any:
        clock.enter("generate")
        with autocast():
            query_responses, logits = original["batch_generation"](model, queries, *rest)
        clock.enter("score")
        generated((queries, query_responses))
        return query_responses, logits

    def forward(model: Any, *rest: Any) -> Any:
        if model is trained:
            clock.enter("train")
            return original["forward"](model, *rest)  # accelerate's own autocast
        with autocast():
            return original["forward"](model, *rest)

    def get_reward(*arguments: Any) -> Any:
        with autocast():
            return original["get_reward"](*arguments)

    wrappers = {"batch_generation": batch_generation, "forward": forward, "get_reward": get_reward}
    for name, wrapper in wrappers.items():
        setattr(module, name, wrapper)
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(module, name, function)


def batch_of(work: Mapping[str, Any], generated: Any) -> Batch:
    """Return queries [B, P] and queries with responses [B, P + L], padded, from the arguments of a `watched` call."""
    queries, query_responses = generated
    prompts, responses = (
        [[token for token in row if token != work["pad_id"]] for row in rows.tolist()]
        for rows in (queries, query_responses[:, queries.shape[1] :])
    )
    return Batch(prompts, responses, query_responses.numel())


def models(trainer: Any) -> dict[str, Any]:
    """By role."""
    return {
        "actor": trainer.policy_model,
        "reference": trainer.ref_model,
        "critic": trainer.value_model,
        "reward": trainer.reward_model,
    }
