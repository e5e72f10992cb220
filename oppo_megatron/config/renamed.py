"""Renamed and removed settings: each old key with its new name, or with its fixed value.

A configuration with an old key is refused with a message that names the new one (`take_out_renamed`).  Files written by a run
of an older version are read with the new names (`with_new_names`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Put = Callable[[Any, Any], Any]
"""What the new key holds: of what it holds so far (None: nothing) and the old key's value."""


def _same(now: Any, value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Moved:
    """The setting is at `key` now.  `how`: the remedy; `put`: turns an older run's value into the new one."""

    key: str
    how: str = "rename it"
    put: Put = _same

    def refusal(self, old: str, value: Any) -> str:
        return f"`{old}` is now `{self.key}`; {self.how}"


@dataclass(frozen=True)
class Fixed:
    """Nothing sets it any more: it is `at` something, because `why`."""

    at: str
    why: str

    def refusal(self, old: str, value: Any) -> str:
        return f"`{old}` is {_shown(value)}, but is now fixed at {self.at}, because {self.why}; remove it"


def _place(index: int, empty: list[Any]) -> Put:
    """The value as one of a list's."""
    return lambda now, value: [value if place == index else other for place, other in enumerate(now or empty)]


def _limit(name: str, usual: float) -> Put:
    """A limit of its process, where that has one and the limit is not the usual one."""
    return lambda now, value: {**(now if isinstance(now, Mapping) else {}), name: value} if now and value != usual else now


def _lenient(word: Any) -> Put:
    return lambda now, value: value == word or bool(now)


def _direction(now: Any, value: Any) -> Any:
    return f"{value} {now}" if value and isinstance(now, str) else now


def _column(now: Any, value: Any) -> Any:
    return [now, value] if isinstance(now, str) and value is not None else now


ACTIONS = "write `actions` there in place of true"
CHANGE = "write [increase, decrease]"
WORDS = "write the direction before the metric, as in `min toxicity`"
PAIR = "write [lowest, highest] there, null where there is none"
NOT_TUNED = "no run has gained by another value"
GUARDED = "a run that needs more of them is not sound"

_REQUEST = "it bounds a request of any size that `oppo train` sends"

NO_CONTEXT_PARALLELISM = Fixed(
    "1", "megatron-core's context parallelism needs transformer-engine's attention, which this runtime does not use"
)


def _of_overlap(block: str) -> dict[str, Moved | Fixed]:
    return {
        f"{block}.max_deferrals": Moved(f"{block}.max_staleness"),
        f"{block}.chunk.trials": Fixed("1", NOT_TUNED),
        f"{block}.chunk.candidates": Moved(
            f"{block}.chunk.adaptive",
            "write the sizes there in place of true",
            lambda now, value: now if now is False or value == [16, 32, 64] else value,
        ),
        f"{block}.delta.target_waste": Fixed("0.35", NOT_TUNED),
        f"{block}.delta.dead_band": Fixed("0.05", NOT_TUNED),
        f"{block}.delta.ess_floor": Fixed("0.8", NOT_TUNED),
        f"{block}.delta.length_gap_cap": Fixed("0.4", NOT_TUNED),
        f"{block}.delta.increase": Moved(f"{block}.delta.change", CHANGE, _place(0, [1, 1])),
        f"{block}.delta.decrease": Moved(f"{block}.delta.change", CHANGE, _place(1, [1, 1])),
    }


def _of_optimizer(place: str) -> dict[str, Moved | Fixed]:
    return {
        f"{place}.beta{index + 1}": Moved(f"{place}.betas", "write [beta1, beta2]", _place(index, [0.9, 0.95]))
        for index in (0, 1)
    }


def _of_part(part: str) -> dict[str, Moved | Fixed]:
    retries = Fixed("0.5 s, doubled up to 30 s", "a service that fails for a while needs no other pauses")
    breaker = Fixed("5 failures, then one request every 10 s", "a service that is down needs no other pauses")
    isolate, patience, scores = f"{part}.isolate", f"{part}.remote.give_up_s", f"{part}.remote.score_range"
    lenient = f"{part}.lenient"
    return {
        f"{part}.limits.wall_s": Moved(isolate, "write {wall_s: ...} there in place of true", _limit("wall_s", 30)),
        f"{part}.limits.memory_mb": Moved(
            isolate, "write {memory_mb: ...} there in place of true", _limit("memory_mb", 4096)
        ),
        f"{part}.limits.cpu_s": Fixed("the seconds of `wall_s`", "no call takes more of the processor than of the clock"),
        f"{part}.limits.start_s": Fixed("60 s", "importing a module takes less"),
        f"{part}.remote.retry_s": retries,
        f"{part}.remote.retry_max_s": retries,
        f"{part}.remote.breaker_failures": breaker,
        f"{part}.remote.breaker_pause_s": breaker,
        f"{part}.remote.on_failure": Moved(
            patience,
            "write 0 there in place of stop, and nothing in place of wait",
            lambda now, value: 0.0 if value == "stop" else now,
        ),
        f"{part}.method": Moved(lenient, "write true there in place of flexible", _lenient("flexible")),
        f"{part}.match": Moved(lenient, "write true there in place of search", _lenient("search")),
        f"{part}.partial_credit": Moved(lenient, put=_lenient(True)),
        f"{part}.remote.min_score": Moved(scores, PAIR, _place(0, [None, None])),
        f"{part}.remote.max_score": Moved(scores, PAIR, _place(1, [None, None])),
    }


RENAMED: dict[str, Moved | Fixed] = {
    "preempt.deadline_s": Moved("preempt_deadline_s", put=lambda now, value: value if now is None else now),
    "preempt.enabled": Moved(
        "preempt_deadline_s",
        "write 0 there in place of false",
        lambda now, value: 0.0 if value is False else now,
    ),
    "stall.deadline_s": Moved("stall_deadline_s"),
    "data_epochs": Moved("epochs"),
    "max_steps": Moved("steps"),
    "data.long_prompts": Moved("data.long_rows"),
    "long_rows": Moved("data.long_rows"),
    "evaluation.data.long_prompts": Moved("evaluation.data.long_rows"),
    "evaluation.max_prompts": Moved("evaluation.max_rows"),
    "evaluation.answer": Fixed(
        "`answer`", "a part of `evaluation.metrics` with kind verifier names another column"
    ),
    "early_stop.mode": Moved("early_stop.metric", WORDS, _direction),
    "early_stop.min_delta": Fixed("0", "better means better by anything"),
    "checkpoint.best_metric": Moved(
        "checkpoint.keep_best",
        "name the metric there in place of true",
        lambda now, value: value if now and value is not None else now,
    ),
    "checkpoint.best_mode": Moved("checkpoint.keep_best", WORDS, _direction),
    "logging.actions": Moved("logging.trace", ACTIONS, lambda now, value: "actions" if value else now),
    "debug.actions": Moved("logging.trace", ACTIONS, lambda now, value: "actions" if value else now),
    "save_weights": Moved(
        "checkpoint.final", "write `nothing` there in place of false", lambda now, value: now if value else "nothing"
    ),
    "logging.wandb_mode": Fixed("what the variable WANDB_MODE says", "Weights & Biases reads it itself"),
    "rollout.stop_token_ids": Moved(
        "rollout.stop", "write the ids there, among the texts", lambda now, value: [*(now or []), *value]
    ),
    "rollout.forced_lengths": Moved("debug.forced_lengths"),
    "rollout.forced_lengths.median": Moved(
        "debug.forced_lengths", "write [median, sigma] (1 where there was no sigma)", lambda now, value: [value, 1.0]
    ),
    "rollout.forced_lengths.sigma": Moved(
        "debug.forced_lengths",
        "write [median, sigma]",
        lambda now, value: [now[0], value] if isinstance(now, list) and value is not None else now,
    ),
    "rollout.forced_lengths.trace": Moved("debug.forced_lengths", "name the file there", lambda now, value: value or now),
    "rollout.forced_lengths.column": Moved("debug.forced_lengths", "write [file, column]", _column),
    "debug.trace_column": Moved("debug.forced_lengths", "write [file, column]", _column),
    "rollout.forced_lengths.scale": Fixed("auto", "the lengths of a trace are to fit `rollout.max_response_tokens`"),
    "overlap.hide_critic": Moved(
        "debug.wait_for",
        "write `critic` there in place of false, and nothing in place of true",
        lambda now, value: [*(now or []), *([] if value else ["critic"])],
    ),
    "overlap.forward_ahead": Moved(
        "debug.wait_for",
        "write `scores` there in place of false, and nothing in place of true",
        lambda now, value: [*(now or []), *([] if value else ["scores"])],
    ),
    "overlap.beside_actor": Fixed("last", "scoring beside the decoding actor was never faster"),
    "overlap.backfill_every": Moved(
        "overlap.backfill", "write the number there in place of true", lambda now, value: value if now and value else now
    ),
    "overlap.weave.micro_batches": Moved(
        "overlap.weave", "write [micro_batches, prefill_tokens]", _place(0, ["auto", "auto"])
    ),
    "overlap.weave.prefill_tokens": Moved(
        "overlap.weave", "write [micro_batches, prefill_tokens]", _place(1, ["auto", "auto"])
    ),
    **_of_overlap("overlap"),
    **_of_overlap("trainer.ppo.oppo"),
    "trainer.ppo.oppo.scorer.timeout_s": Fixed("60 s", NOT_TUNED),
    "trainer.ppo.oppo.scorer.give_up_s": Fixed("600 s", NOT_TUNED),
    "ppo.whiten_advantages": Moved(
        "algorithm.scale",
        "write whiten in place of true, none in place of false",
        lambda now, value: "whiten" if value else "none",
    ),
    "ppo.ratio_cap": Moved(
        "ppo.clip_high", "write it less 1 there", lambda now, value: now if value is None else value - 1
    ),
    "ppo.staleness.correction": Moved("ppo.staleness"),
    "ppo.staleness.weight_cap": Fixed("2", NOT_TUNED),
    "ppo.kl.adaptive": Moved("ppo.kl.target", "write the KL per response to keep (6 if none was given)", lambda now, value: now),
    "ppo.kl.adaptive.target": Moved("ppo.kl.target"),
    "ppo.kl.adaptive.horizon": Fixed("10 steps", NOT_TUNED),
    "ppo.logprob_gap_limit": Moved("guards.logprob_gap.limit"),
    "guards.max_skips": Fixed("3", GUARDED),
    "guards.max_rollbacks": Fixed("2", GUARDED),
    "guards.kept_batches": Fixed("8", "as many show the fault"),
    "placement.auto.candidates": Fixed("single, disaggregated and colocated", "what this machine cannot do is left out anyhow"),
    "placement.auto.repeats": Fixed("1", "close placements are measured three times anyhow"),
    "actor.train.cp": NO_CONTEXT_PARALLELISM,
    "critic.train.cp": NO_CONTEXT_PARALLELISM,
    "runtime.rendezvous_timeout_s": Fixed("a sixth of `runtime.timeout_s`, at least 60 s", "both wait for the same ranks"),
    **_of_optimizer("actor.optimizer"),
    **_of_optimizer("critic.optimizer"),
    **_of_optimizer("optimizer"),
    **_of_part("rewards[]"),
    **_of_part("evaluation.metrics[]"),
    "limits.max_bytes": Fixed("8 MiB", _REQUEST),
    "limits.max_items": Fixed("256", _REQUEST),
    "limits.max_characters": Fixed("200000", _REQUEST),
    "limits.max_waiting": Fixed("16", _REQUEST),
    "limits.read_s": Fixed("30 s", _REQUEST),
}
"""The renamed settings by dotted key; `[]` stands for a place in a list."""

RENAMED_VALUES: dict[str, dict[Any, Any]] = {"runtime.decode_path": {"lean": "fused"}}
"""Words that are called otherwise now, by the key that takes them."""


OF_ANSWERS = ("turns", "completion_template", *(f"columns.{part}" for part in ("completion", "label", "completions", "labels")))
"""Settings of `data` that older versions of `oppo train` had, too, and did not read."""
OF_PROMPTS = ("max_prompt_tokens",)
"""And those of supervised training."""

NOW_SECTIONS = {"guards.logprob_gap": "action"}
"""Settings that were a word, and are a section now: the key in it that takes the word."""


def renamed(key: str) -> str | None:
    """A sentence of what has become of a setting, whose places in lists may be left out; None where it is no old one."""
    for old, rule in RENAMED.items():
        if key in (old, old.replace("[]", "")) or _general(key) == old:
            return f"`{key}` is now " + (f"`{rule.key}`; {rule.how}" if isinstance(rule, Moved) else f"fixed at {rule.at}")
    return None


def take_out_renamed(tree: Any, prefix: str = "") -> tuple[Any, list[str]]:
    """The settings without those of the table, and a sentence for each of these.  `prefix` is where the tree stands."""
    left, problems = deepcopy(tree), list[str]()
    for key, name in NOW_SECTIONS.items():
        if isinstance(value := _at(left, key), str):
            problems.append(f"`{key}` is now a section; write `{name}: {value}` in it")
            _put(left, key, {name: value})
    for old, value in list(_found(left, prefix)):
        problems.append(RENAMED[_general(old)].refusal(old, value))
        _remove(left, old.removeprefix(prefix))
    for key, words in RENAMED_VALUES.items():
        value = _at(left, key)
        if isinstance(value, str) and value in words:
            problems.append(f"`{key}`: {value!r} is now called {words[value]!r}; rename it")
            _put(left, key, words[value])
    return left, problems


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What a run wrote down, as this version calls it: an older one's settings moved, and those left out that none has."""
    found = deepcopy(dict(tree))
    for key, name in NOW_SECTIONS.items():
        if isinstance(value := _at(found, key), str):
            _put(found, key, {name: value})
    old_values = list(_found(found, ""))
    for old, _ in old_values:
        _remove(found, old)
    for old, value in old_values:
        rule = RENAMED[_general(old)]
        if not isinstance(rule, Moved) or isinstance(value, Mapping):
            continue
        new = _specific(rule.key, old)
        if rule.put is _same:
            _put(found, new, value)
        elif value is not None and (put := rule.put(_at(found, new), value)) is not None:
            _put(found, new, put)
    for key, words in RENAMED_VALUES.items():
        if isinstance(value := _at(found, key), str):
            _put(found, key, words.get(value, value))
    names = OF_ANSWERS if "rollout" in found else OF_PROMPTS if "model" in found else ()
    for key in {f"{place}.{name}" for place in ("data", "evaluation.data") for name in names} & set(dict(_keys(found, ""))):
        _remove(found, key)
    return found


def _found(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Old keys in a tree with their values, in the order of the table; a section's own key only where none within is one."""
    keys = dict(_keys(tree, prefix))
    by_general: dict[str, list[str]] = {}
    for key in keys:
        by_general.setdefault(_general(key), []).append(key)
    for old in RENAMED:
        for key in by_general.get(old, []):
            if not any(_general(each) in RENAMED for each in keys if each.startswith(f"{key}.")):
                yield key, keys[key]


def _keys(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every dotted key of a tree, places in lists as numbers."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    for name, inner in items:
        below = f"{key}{name}" if not key or key.endswith(".") else f"{key}.{name}"
        yield below, inner
        yield from _keys(inner, below)


def _general(key: str) -> str:
    """`rewards.0.kind` -> `rewards[].kind`."""
    return re.sub(r"\.\d+(?=\.|$)", "[]", key)


def _specific(new: str, old: str) -> str:
    """The places of the old key's lists in the new one."""
    for place in re.findall(r"\.(\d+)(?=\.|$)", old):
        new = new.replace("[]", f".{place}", 1)
    return new


def _step(place: Any, name: str) -> Any:
    if isinstance(place, list):
        return place[int(name)] if name.isdigit() and int(name) < len(place) else None
    return place.get(name) if isinstance(place, Mapping) else None


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = _step(tree, name)
    return tree


def _remove(tree: Any, key: str) -> None:
    """Without the key, and without sections that nothing is left in."""
    section, _, name = key.rpartition(".")
    place = _at(tree, section) if section else tree
    if isinstance(place, dict):
        place.pop(name, None)
        if not place and section and not section.rpartition(".")[2].isdigit():
            _remove(tree, section)


def _put(tree: Any, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        below = _step(tree, section)
        if not isinstance(below, dict | list):
            tree[section] = below = {}
        tree = below
    tree[name] = value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
