"""Decoding a wave by NeMo's own generation, watched token by token.

Legend: b rows of a call, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nemo.collections.nlp.modules.common.text_generation_strategy import GPTModelTextGenerationStrategy
from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.distributed import broadcast_2d_tensor_within_pp
from nemo_aligner.utils.text_generation_utils import verify_is_valid_and_clamp_range_
from omegaconf import OmegaConf
from torch import Tensor

Watch = Callable[[Tensor, Tensor], bool]
"""(tokens so far [b, S], end position of each row [b], -1 while it runs) -> True to stop here."""


def plain(tree: Any) -> dict[str, Any]:
    """A section of NeMo's configuration as a mapping of plain values."""
    found = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


class WatchedStrategy:
    """A generation strategy of NeMo's, or the user's, that lets `watch` see every position and end the call.

    The end of a row is told as NeMo-Aligner's `TrackLengthGPTModelTextGenerationStrategy` tells it.  NeMo asks the last pipeline
    stage alone whether a generation ends: only its ranks call `watch`.
    """

    def __init__(self, strategy: Any, context_lengths_b: Tensor, watch: Watch):
        self._strategy, self._context_lengths_b, self._watch = strategy, context_lengths_b, watch
        self.ends_b = torch.full_like(context_lengths_b, -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def end_of_generation_condition(self, tokens: Tensor, prev: Tensor, eod_id: int, end_strings: list[str]) -> Tensor:
        """Return the strategy's condition; all true if the watch stops the decoding."""
        is_end_b: Tensor = self._strategy.end_of_generation_condition(tokens, prev, eod_id, end_strings)
        position = tokens.size(1) - 1
        first_end_b = (self._context_lengths_b <= position) & is_end_b & (self.ends_b < 0)
        self.ends_b = torch.where(first_end_b, position, self.ends_b)
        return torch.ones_like(is_end_b) if self._watch(tokens, self.ends_b) else is_end_b


@contextmanager
def watched(model: Any, inputs: tuple[Tensor, Tensor], watch: Watch) -> Iterator[None]:
    """While this lasts, `watch` sees what the model's own `infer` generates, if it does so by the model's `generate`.

    `inputs` are texts [b, S] and their lengths [b].  A call that is given others, as by an `infer` that sorts or divides its
    rows, is left alone.
    """
    generate, own = model.generate, vars(model).get("generate")

    def shown(*args: Any, **kwargs: Any) -> Any:
        strategy: Any = kwargs.get("strategy")
        given: Any = kwargs.get("inputs", args[0] if args else None)
        if strategy is not None and _alike(given, inputs):
            kwargs["strategy"] = WatchedStrategy(strategy, given[1], watch)
        return generate(*args, **kwargs)

    model.generate = shown
    try:
        yield
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own


def _alike(given: Any, inputs: tuple[Tensor, Tensor]) -> bool:
    """True if `given` equals these texts and lengths, on any device."""
    if not isinstance(given, tuple | list) or len(given) != len(inputs):
        return False
    pairs = zip(given, inputs, strict=True)
    return all(isinstance(one, Tensor) and torch.equal(one, other.to(one.device)) for one, other in pairs)


@dataclass(frozen=True)
class Decoded:
    """`tokens_bS` as generated; `lengths_b` of prompt and response; `ended_b`: the row stopped of itself."""

    tokens_bS: Tensor
    lengths_b: Tensor
    ended_b: Tensor


class Decoder:
    """Generation by a `MegatronGPTActorModel`, with the settings of its `ppo` section."""

    def __init__(self, model: Any):
        ppo = model.cfg.ppo
        self.model = model
        self._lengths = plain(ppo.length_params)
        self._sampling = plain(ppo.sampling_params)
        self.max_new: int = self._lengths["max_length"]
        self.min_new: int = self._lengths["min_length"]
        learned = model.cfg.get("position_embedding_type", "learned_absolute") == "learned_absolute"
        self._longest = model.cfg.encoder_seq_length + 1 if learned else None

    def limit(self, prompt_length: int) -> int:
        """Most tokens of prompt and response, as NeMo's strategy clips them."""
        limit = prompt_length + self.max_new
        return limit if self._longest is None else min(limit, self._longest)

    def decode(
        self, texts_bS: Tensor, contexts_b: Tensor, limits_b: Tensor, watch: Watch, *, carried: bool = False
    ) -> Decoded:
        """Go on from contexts of `contexts_b` tokens until each row has ended, has `limits_b` tokens, or `watch` stops it.

        `texts_bS` has room for that.  `carried` rows have their least length already.
        """
        device = torch.cuda.current_device()
        texts_bS, contexts_b, limits_b = (t.to(device) for t in (texts_bS, contexts_b, limits_b))
        strategy = WatchedStrategy(GPTModelTextGenerationStrategy(self.model), contexts_b, watch)
        steps = int(limits_b.max() - contexts_b.max())
        output = self.model.generate(
            inputs=(texts_bS, contexts_b),
            length_params={**self._lengths, "max_length": steps, "min_length": 0 if carried else self.min_new},
            sampling_params=self._sampling,
            strategy=strategy,
        )
        tokens_bS = torch.tensor(output["token_ids"], dtype=torch.long, device=device) if output else None
        tokens_bS = broadcast_2d_tensor_within_pp(tokens_bS, dtype=torch.long)
        ends = strategy.ends_b.view(-1, 1) if parallel_state.is_pipeline_last_stage() else None
        ends_b = broadcast_2d_tensor_within_pp(ends, dtype=torch.long).flatten()
        last_b = limits_b.clamp(max=tokens_bS.size(1))
        return Decoded(tokens_bS, torch.where(ends_b >= 0, ends_b + 1, last_b), ends_b >= 0)

    def validity(self, tokens_bS: Tensor, lengths_b: Tensor) -> Tensor:
        """NeMo-Aligner's `is_end` [b]; ids beyond the vocabulary are clamped in place."""
        strategy = GPTModelTextGenerationStrategy(self.model)
        end_strings = self.model.cfg.ppo.sampling_params["end_strings"]
        valid_b: Tensor = verify_is_valid_and_clamp_range_(
            tokens_bS, lengths_b, strategy, self.model.tokenizer, end_strings
        )
        return valid_b

    def padded(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        """Rows of ids as one tensor, filled up with the end of text."""
        text = torch.full((len(rows), width), self.model.tokenizer.eos_id, dtype=torch.long)
        for i, row in enumerate(rows):
            text[i, : len(row)] = torch.tensor(row, dtype=torch.long)
        return text
