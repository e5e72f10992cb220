"""Ranks that measure a policy, and keep what it answered."""

from pathlib import Path
from typing import Any

import lm_eval
import torch
import torch.distributed as dist

from oppo_megatron.cluster.world import World
from oppo_megatron.config.model import ParallelConfig, RuntimeConfig
from oppo_megatron.evaluation.tasks import TaskConfig, measure_tasks
from oppo_megatron.policy.answering import build_place, load_policy
from oppo_megatron.policy.finding import find_policy, policy_tokenizer

Responses = dict[str, list[tuple[str, int, Any]]]
"""(filter, document, what the model answered to its requests) by task."""


def responses_of(found: Any) -> Responses:
    return {name: [(each["filter"], each["doc_id"], each["resps"]) for each in rows] for name, rows in found["samples"].items()}


def measured(directory: Path, tasks: dict[str, TaskConfig], layout: tuple[int, int, int], context: int, as_chat: bool) -> Any:
    """On the rank that leads: responses, figures and warnings; None elsewhere."""
    seen, told, evaluate = Responses(), list[str](), lm_eval.evaluate

    def keeping(*args: Any, **options: Any) -> Any:
        found = evaluate(*args, **options)
        seen.update(responses_of(found))
        return found

    lm_eval.evaluate = keeping
    try:
        tp, pp, dp = layout
        place = build_place(
            World(dist.get_rank(), dist.get_world_size(), torch.device("cpu")), ParallelConfig(tp=tp, pp=pp, dp=dp)
        )
        policy = find_policy(directory)
        runtime = RuntimeConfig(micro_batch_tokens=1500).with_threads(1)
        loaded = load_policy(policy, place, runtime, policy_tokenizer(policy), context)
        results = dict(measure_tasks(tasks, loaded, 4, None, told.append, as_chat=as_chat))
    finally:
        lm_eval.evaluate = evaluate
    return (seen, results, told) if results else None
