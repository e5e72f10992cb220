"""Held-out accuracy: greedy decoding, judged by a verifier."""

from __future__ import annotations

from collections.abc import Sequence

from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.config.run import EvaluationConfig
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.records import Prompt
from oppo_megatron.rewards.verifiers import verify
from oppo_megatron.runtime.activity import Activity
from oppo_megatron.runtime.completions import PromptDecoder
from oppo_megatron.runtime.links import Links
from oppo_megatron.runtime.mcore.model import RoleModel
from oppo_megatron.runtime.sampler import Sampling
from oppo_megatron.runtime.stopping import Stopping


class Evaluator:
    """Decodes the held-out prompts with the actor as it is, on a cache of its own that lives only as long.

    The cache has at most `max_slots` slots and `kv_budget_bytes` (None: no limit).
    """

    def __init__(
        self,
        config: EvaluationConfig,
        prompts: PromptSet,
        tokenizer: Tokenizer,
        stopping: Stopping,
        runtime: RuntimeConfig,
        max_slots: int,
        kv_budget_bytes: int | None,
    ):
        self.config, self.tokenizer, self.stopping, self.runtime = config, tokenizer, stopping, runtime
        self.max_slots, self.kv_budget_bytes = max_slots, kv_budget_bytes
        count = min(len(prompts), config.max_prompts)
        self.prompts: Sequence[Prompt] = list(PromptStream(prompts, 0, epochs=1, limit=count, shuffle=False))

    def accuracy(self, model: RoleModel, links: Links, activity: Activity) -> float:
        """Share of the prompts answered right.  Every rank of the actor makes the call and gets the same answer."""
        decoder = PromptDecoder(
            model,
            links,
            self.runtime,
            num_slots=min(len(self.prompts), self.max_slots),
            sampling=Sampling(temperature=0.0),
            stopping=self.stopping,
            kv_budget_bytes=self.kv_budget_bytes,
            activity=activity,
        )
        right = 0.0
        for rollout in decoder.decode(self.prompts):
            response = self.tokenizer.decode(rollout.tokens)
            right += verify(self.config.verifier, response, rollout.prompt.fields[self.config.answer])
        return right / len(self.prompts)
