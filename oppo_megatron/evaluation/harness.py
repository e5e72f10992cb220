"""A policy as a model of lm-evaluation-harness.  Imports lm_eval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from oppo_megatron.clock import ByTime
from oppo_megatron.data.tokenizer import encode_prompt, hidden_ids
from oppo_megatron.errors import ConfigError
from oppo_megatron.policy.answering import LoadedPolicy
from oppo_megatron.policy.answers import Drawing

BLOCK = 256  # pairs per request to the ranks
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


class PolicyLM(TemplateLM):
    """On the rank that leads.  As in the harness, prompts that are too long lose their beginning; `tell` gets a warning."""

    eot_token_id = prefix_token_id = -1  # abstract in the base; set below
    tokenizer_name = ""  # read for chats, to name a cache of requests that is off

    def __init__(self, policy: LoadedPolicy, num_slots: int, tell: Callable[[str], None]):
        super().__init__()
        self._policy, self._text, self._num_slots, self._tell = policy, policy.tokenizer, num_slots, tell
        self._progress = ByTime(tell)
        self.max_length, self.eot_token_id = policy.model.max_length, self._text.eos_id
        self.prefix_token_id = self._text.eos_id if self._text.bos_id is None else self._text.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._text.encode(string) if add_special_tokens is False else encode_prompt(self._text, string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Without a generation prompt, the last message is the beginning of an answer."""
        text, begun = self._text.chat.render(chat_history, generation_prompt=add_generation_prompt), chat_history[-1]["content"]
        return text if add_generation_prompt else text[: text.rindex(begun.strip()) + len(begun.strip())]

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        pairs, found, room = [], list[tuple[float, bool]](), self.max_length + 1  # the last token is not read
        self._tell_cut([len(context) + len(continuation) for _, context, continuation in requests], room)
        for _, context, continuation in requests:
            if not continuation:  # a choice without text, or merged by the tokenizer into the context's last token
                raise ConfigError(
                    f"a choice of a task has no token of its own after {self._text.decode(context[-20:])!r}; leave it out"
                )
            kept = [*context, *continuation][-room:]
            size = min(len(continuation), len(kept) - 1)
            pairs.append((kept[:-size], kept[-size:]))
        for start in range(0, len(pairs), BLOCK):
            found += self._policy.answer((pairs[start : start + BLOCK], None, 0)) or ()
            self._progress(f"{len(found)} of {len(pairs)} log-likelihoods")
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        raise NotImplementedError("`find_tasks` refuses tasks that ask for it")

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """All requests are of one task, which has one way of decoding."""
        drawing, stop = self._drawing(requests[0].args[1])
        room, contexts = self.max_length - drawing.max_tokens, [self.tok_encode(request.args[0]) for request in requests]
        self._tell_cut([len(tokens) for tokens in contexts], room)
        texts = self._policy.answer(([(tokens[-room:], ()) for tokens in contexts], drawing, self._num_slots), self._progress)
        return [postprocess_generated_text(text, stop, None) for text in texts or ()]

    def _drawing(self, given: dict[str, Any]) -> tuple[Drawing, list[str]]:
        """Settings, and stop texts; a text that is a special token ends a response by its id."""
        settings = normalize_gen_kwargs(given)
        if unknown := settings.keys() - KNOWN:
            raise ConfigError(f"a task sets {', '.join(sorted(unknown))} for decoding, which is not known here; leave it out")
        most, usual = settings["max_gen_toks"], 1.0 if settings.get("do_sample") else 0.0
        if most >= self.max_length:
            raise ConfigError(f"a task decodes {most} tokens, which leave no room in a context of {self.max_length}; lengthen it")
        stop = [text for text in settings["until"] if text]
        special = {text: ids for text in stop if (ids := hidden_ids(text, self._text)) is not None}
        how = settings.get("temperature", usual), settings.get("top_k") or 0, settings.get("top_p") or 1.0
        stop_ids, texts = (i for ids in special.values() for i in ids), (text for text in stop if text not in special)
        return Drawing(most, *how, stop=tuple(texts), stop_token_ids=tuple(stop_ids)), stop

    def _tell_cut(self, lengths: Sequence[int], room: int) -> None:
        if cut := sum(length > room for length in lengths):
            self._tell(f"WARNING: {cut} of {len(lengths)} prompts lose their beginning: the context has {self.max_length} tokens")
