"""Policies measured by lm-evaluation-harness, and the entry point of ranks of `oppo eval --tasks`.  Imports lm_eval."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from oppo_megatron.clock import ByTime, to_stderr
from oppo_megatron.cluster.world import choose_device, open_world
from oppo_megatron.data.tokenizer import encode_prompt, hidden_ids
from oppo_megatron.errors import ConfigError
from oppo_megatron.evaluation.tasks import TaskConfig, load_task
from oppo_megatron.policy.answering import LoadedPolicy, build_place, load_policy
from oppo_megatron.policy.answers import Drawing, Request, TaskResults
from oppo_megatron.policy.finding import policy_tokenizer
from oppo_megatron.rundir.directory import write_json

BLOCK = 256  # pairs per request to the ranks
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


class PolicyLM(TemplateLM):
    """On the rank that leads.  As in the harness, prompts that are too long lose their beginning; `tell` gets a warning."""

    eot_token_id = prefix_token_id = -1  # those of the policy, below

    def __init__(self, policy: LoadedPolicy, num_slots: int, tell: Callable[[str], None]):
        super().__init__()
        self._policy, self._text, self._num_slots = policy, policy.tokenizer, num_slots
        self._tell, self._progress = tell, ByTime(tell)
        self.max_length, self.eot_token_id = policy.model.max_length, self._text.eos_id
        self.prefix_token_id = self._text.eos_id if self._text.bos_id is None else self._text.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._text.encode(string) if add_special_tokens is False else encode_prompt(self._text, string)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        pairs, found, room = [], list[tuple[float, bool]](), self.max_length + 1  # the last token is not read
        self._tell_cut([len(context) + len(continuation) for _, context, continuation in requests], room)
        for _, context, continuation in requests:
            kept = [*context, *continuation][-room:]
            size = min(len(continuation), len(kept) - 1)
            pairs.append((kept[:-size], kept[-size:]))
        for start in range(0, len(pairs), BLOCK):
            found += self._policy.answer((pairs[start : start + BLOCK], None, 0)) or ()
            self._progress(f"{len(found)} of {len(pairs)} log-likelihoods")
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        texts, alike = [""] * len(requests), dict[str, list[int]]()
        for place, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(place)
        for places in alike.values():
            drawing, stop = self._drawing(requests[places[0]].args[1])
            room, contexts = self.max_length - drawing.max_tokens, [self.tok_encode(requests[i].args[0]) for i in places]
            self._tell_cut([len(tokens) for tokens in contexts], room)
            asked = [(tokens[-room:], ()) for tokens in contexts], drawing, self._num_slots
            for place, text in zip(places, self._policy.answer(asked, self._progress) or (), strict=True):
                texts[place] = postprocess_generated_text(text, stop, None)
        return texts

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


def _say(tell: Callable[[str], None], name: str, line: str) -> None:
    tell(f"{name}: {line}")


def measure_tasks(
    tasks: Mapping[str, TaskConfig], policy: LoadedPolicy, num_slots: int, limit: int | None, tell: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each task's name and result on the rank that leads: shots, versions and `metrics`.  Collective."""
    if not policy.leads:
        while policy.answer(None) is not None:
            pass
        return
    try:
        for name, config in tasks.items():
            task = load_task(config)
            lm = PolicyLM(policy, num_slots, partial(_say, tell, name))
            found = lm_eval.evaluate(lm, {"tasks": {task.task_name: task}}, limit=limit)
            about = {"lm_eval": lm_eval.__version__, "version": task.VERSION, "shots": task.get_config("num_fewshot")}
            yield name, {**about, "metrics": dict(_metrics(found))}
    finally:
        policy.answer(None)


def _metrics(found: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Mean, the harness's standard error, and values by document of each metric."""
    (figures,), (samples,) = found["results"].values(), found["samples"].values()
    for key in figures:
        metric, comma, filtered = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            error, rows = figures[f"{metric}_stderr,{filtered}"], [each for each in samples if each["filter"] == filtered]
            values = {each["doc_id"]: float(each[metric]) for each in rows if isinstance(each.get(metric), int | float)}
            name, mean = metric if filtered == "none" else f"{metric} {filtered}", float(figures[key])
            yield name, {"mean": mean, "error": None if error == "N/A" else float(error), "documents": values}


def run_rank(kind: str, request: Request) -> int:
    choose_device(request.runtime)
    with open_world(request.runtime) as world:
        tokenizer, place, to = policy_tokenizer(request.policy), build_place(world, request.parallel), request.to
        assert isinstance(to, TaskResults)
        policy = load_policy(request.policy, place, request.runtime, tokenizer, request.max_length)
        for name, result in measure_tasks(to.tasks, policy, request.num_slots, to.limit, to_stderr):
            write_json(to.folder / f"{name}.json", result)
    return 0
