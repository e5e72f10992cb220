"""The end of responses: EOS ids, stop texts across tokens, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oppo_megatron.chunks import FinishReason, Ints
from oppo_megatron.config.ppo import ForcedLengths, ForcedLimits, Quantile, RolloutConfig
from oppo_megatron.token_text import Completing, Decode

EDGE_CHARACTERS = 8  # difference between a decoded part and the whole: a leading space, half a character
FIRST_TOKENS = 16


class StopText:
    def __init__(self, strings: Sequence[str], decode: Decode):
        assert strings and all(strings)
        self.strings, self._decode = tuple(strings), decode
        self._longest = max(map(len, strings))
        self._completing = Completing(strings, decode)

    def ends(self, response: Sequence[int]) -> bool:
        if response[-1] not in self._completing:
            return False
        size = FIRST_TOKENS + self._longest
        while size < len(response):
            text = self._decode(response[-size:])
            within = text[EDGE_CHARACTERS:]
            if self._in(within):
                return True
            if len(within) >= self._longest and not self._in(text):
                return False
            size *= 2
        return self._in(self._decode(response))

    def _in(self, text: str) -> bool:
        return any(string in text for string in self.strings)


@dataclass(frozen=True)
class Stopping:
    """Ends a response at `eos_ids`, `text` or its limit; `forced`: only at its limit."""

    eos_ids: tuple[int, ...]
    max_response_tokens: int
    forced: ForcedLimits | None = None
    text: StopText | None = None

    @classmethod
    def of(
        cls, rollout: RolloutConfig, eos_ids: Sequence[int], seed: int, trace: Quantile | None = None,
        decode: Decode | None = None, forced: ForcedLengths | None = None,
    ) -> Stopping:  # fmt: skip
        """`trace` has the lengths of its file."""
        if forced is None:
            text = StopText(rollout.stop_texts, decode) if rollout.stop_texts and decode is not None else None
            return cls(all_ids(eos_ids, rollout.stop_token_ids), rollout.max_response_tokens, text=text)
        assert (trace is None) == (forced.trace is None), "the lengths of a trace are read before"
        limits = ForcedLimits.of(forced, rollout.max_response_tokens, seed, trace)
        return cls((), rollout.max_response_tokens, limits)

    def ends(
        self, tokens_RK: Ints, rooms: Sequence[int], responses: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[FinishReason | None]]:
        """Return how many of these tokens each response takes, with room for `rooms`, and why it then ends."""
        is_eos_RK = (tokens_RK[..., None] == np.array(self.eos_ids, dtype=np.int64)).any(-1)  # faster than `isin` for few ids
        eos_R = np.where(is_eos_RK.any(1), is_eos_RK.argmax(1) + 1, tokens_RK.shape[1] + 1)
        counts = np.minimum(np.minimum(eos_R, rooms), tokens_RK.shape[1]).tolist()
        reasons: list[FinishReason | None] = [
            "eos" if eos == count else "length" if room == count else None
            for eos, room, count in zip(eos_R.tolist(), rooms, counts, strict=True)
        ]
        for place, response in enumerate(responses if self.text is not None else ()):
            grown = list(response)
            for count in range(1, counts[place] + (reasons[place] != "eos")):
                grown.append(int(tokens_RK[place, count - 1]))
                if self.text is not None and self.text.ends(grown):
                    counts[place], reasons[place] = count, "stop"
                    break
        return counts, reasons

    def after(self, response: Sequence[int], token: int, seq_id: int) -> FinishReason | None:
        """Return why `token` ends the response, if it does."""
        room = self.limit(seq_id) - len(response)
        return self.ends(np.array([[token]], dtype=np.int64), [room], [response])[1][0]

    def limit(self, seq_id: int) -> int:
        return self.max_response_tokens if self.forced is None else self.forced(seq_id)


def all_ids(eos_ids: Sequence[int], stop_token_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*eos_ids, *stop_token_ids]))
