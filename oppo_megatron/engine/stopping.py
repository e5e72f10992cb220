"""The end of responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oppo_megatron.chunks import FinishReason
from oppo_megatron.config.debug import ForcedLengths, Quantile
from oppo_megatron.config.forced_limits import ForcedLimits
from oppo_megatron.config.ppo import RolloutConfig
from oppo_megatron.engine.stop_text import StopText
from oppo_megatron.token_text import Decode


@dataclass(frozen=True)
class Stopping:
    """A response ends at one of `eos_ids`, with one of the strings of `text`, or at its limit.

    With `forced` lengths it ends at its limit only.
    """

    eos_ids: tuple[int, ...]
    max_response_tokens: int
    forced: ForcedLimits | None = None
    text: StopText | None = None

    @classmethod
    def of(
        cls,
        rollout: RolloutConfig,
        eos_ids: Sequence[int],
        seed: int,
        trace: Quantile | None = None,
        decode: Decode | None = None,
        forced: ForcedLengths | None = None,
    ) -> Stopping:
        """`eos_ids` and `decode` are the tokenizer's; without `decode` the texts of `rollout.stop` end nothing.

        `forced` is where responses end in place of EOS; `trace` has the lengths of the file that it names, where it names one.
        """
        if forced is None:
            text = StopText(rollout.stop_texts, decode) if rollout.stop_texts and decode is not None else None
            return cls(all_ids(eos_ids, rollout.stop_token_ids), rollout.max_response_tokens, text=text)
        assert (trace is None) == (forced.trace is None), "the lengths of a trace are read before"
        limits = ForcedLimits.of(forced, rollout.max_response_tokens, seed, trace)
        return cls((), rollout.max_response_tokens, limits)

    def reason(self, response: Sequence[int], limit: int) -> FinishReason | None:
        """Why the response ends with its last token, if it does; `limit`: its largest length."""
        if response[-1] in self.eos_ids:
            return "eos"
        if self.text is not None and self.text.ends(response):
            return "stop"
        return "length" if len(response) == limit else None

    def limit(self, seq_id: int) -> int:
        """Largest response of the sequence, in tokens; a forced one is a function of (seed, sequence id) alone."""
        return self.max_response_tokens if self.forced is None else self.forced(seq_id)


def all_ids(eos_ids: Sequence[int], stop_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Each id that ends a response, once."""
    return tuple(dict.fromkeys([*eos_ids, *stop_token_ids]))
