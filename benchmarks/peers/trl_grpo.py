"""TRL's GRPOTrainer: its construction, and the calls at which one of its steps changes phase.

One optimizer step per batch, so that TRL uses the log-probs of the update's forward as the old ones, its cheapest option.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.peers.trl_common import Batch, Clock, build_tokenizer, run_settings, token_text

METRICS = {"reward_mean": "reward", "actor_loss": "loss"}
"""Ours by TRL's."""


def build_trainer(work: Mapping[str, Any]) -> Any:
    """TRL's GRPOTrainer over the models, prompts and settings of the work."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOTrainer
    from trl.rewards import get_soft_overlong_punishment

    policy = AutoModelForCausalLM.from_pretrained(work["models"]["actor"], dtype=torch.float32, local_files_only=True)
    if "reference" in work["models"]:
        policy.config._name_or_path = work["models"]["reference"]  # the trainer reads its reference from here
    prompts = work["prompts"][:: work["group_size"]]  # it repeats each itself
    return GRPOTrainer(
        args=grpo_config(work),
        processing_class=build_tokenizer(policy.config.vocab_size, work["eos_id"], work["pad_id"]),
        model=policy,
        reward_funcs=get_soft_overlong_punishment(**work["length_penalty"]),
        train_dataset=Dataset.from_dict({"prompt": [" ".join(map(token_text, prompt)) for prompt in prompts]}),
    )


def grpo_config(work: Mapping[str, Any]) -> Any:
    """TRL's settings: generation by transformers, the whole batch at once."""
    from trl import GRPOConfig

    return GRPOConfig(
        **run_settings(work),
        **work["grpo"],
        bf16=work["dtype"] == "bfloat16",
        max_steps=work["steps"],
        num_generations=work["group_size"],
        max_completion_length=work["max_response_tokens"],
        num_iterations=1,
        shuffle_dataset=False,
        use_vllm=False,
    )


@contextlib.contextmanager
def watched(
    trainer: Any, clock: Clock, autocast: Callable[[], contextlib.AbstractContextManager[Any]], generated: Callable[[Any], None]
) -> Iterator[None]:
    """Wrap TRL's generation and loss methods with the clock, and with autocast if the trainer has none.

    `generated` is given prompts and responses of each batch.
    """
    generate, loss = trainer._generate_single_turn, trainer.compute_loss

    def generate_single_turn(prompt_ids: Any, *rest: Any, **options: Any) -> Any:
        clock.enter("generate")
        with autocast():
            found = generate(prompt_ids, *rest, **options)
        clock.enter("score")
        generated((prompt_ids, found[0]))
        return found

    def compute_loss(*arguments: Any, **options: Any) -> Any:
        clock.enter("train")
        return loss(*arguments, **options)

    trainer._generate_single_turn, trainer.compute_loss = generate_single_turn, compute_loss
    try:
        yield
    finally:
        trainer._generate_single_turn, trainer.compute_loss = generate, loss


def batch_of(work: Mapping[str, Any], generated: Any) -> Batch:
    """Return the token ids, row by row, from the arguments of a `watched` call."""
    prompts, responses = generated
    return Batch(prompts, responses, len(prompts) * (max(map(len, prompts)) + max(map(len, responses))))


def models(trainer: Any) -> dict[str, Any]:
    """By role."""
    reference = {} if trainer.ref_model is None else {"reference": trainer.ref_model}
    return {"actor": trainer.accelerator.unwrap_model(trainer.model)} | reference
