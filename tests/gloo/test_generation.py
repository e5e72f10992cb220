"""Decoding: draws depend on nothing but seed, sequence and position; log-probs are those of the training forward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oppo_megatron.chunks import Chunk
from oppo_megatron.engine.round_runner import Decoding, RoundRunner, decoder
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.engine.stream import ChunkOutlet
from oppo_megatron.mcore.batch import join_rows, pack_responses
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.records import Prompt, Rollout
from tests.gloo.models import CPU, PATHS, gather_logits, load, save_small, whole_logits, world_groups
from tests.support.ranks import run_ranks
from tests.unit.test_engine_sampler import plain_truncation

JOBS = "tests.gloo.test_generation:"
EOS = 20  # comes up early in some of the sequences that the tests draw, and never in others
MAX_RESPONSE = 20
PROMPTS = [(1, 2, 3), (9,), (4, 4, 8, 30, 61, 2, 7), (11, 12), (13, 60, 1, 2), (40, 41, 42), (3,)]
NEVER = 10**6


@dataclass
class Finishers:
    needed: int = NEVER
    num_finished: int = 0

    @property
    def ready(self) -> bool:
        return self.num_finished >= self.needed

    def finish(self, *seq_ids: int) -> None:
        self.num_finished += len(seq_ids)


@dataclass
class Variant:
    max_steps: int = NEVER
    slots: int = len(PROMPTS)
    alone: bool = False
    forget: bool = False
    reverse: bool = False
    prefill_tokens: int = 16
    micro_batches: int = 1


VARIANTS = {
    "plain": Variant(), "steps of 1": Variant(max_steps=1), "steps of 7": Variant(max_steps=7),
    "steps of 64": Variant(max_steps=64), "alone": Variant(alone=True, max_steps=7), "one slot": Variant(slots=1),
    "two slots": Variant(slots=2, max_steps=7),
    "other order, small prefills": Variant(reverse=True, prefill_tokens=3, max_steps=7),
    "cache forgotten each round": Variant(max_steps=4, forget=True), "two micro-batches": Variant(max_steps=7, micro_batches=2),
    "three micro-batches, cache forgotten": Variant(max_steps=5, micro_batches=3, forget=True),
}  # fmt: skip


def apply(chunk: Chunk, rollouts: dict[int, Rollout]) -> None:
    for row in chunk.rows:
        rollout = rollouts[row.seq_id]
        assert row.offset == len(rollout.tokens) and not rollout.finished
        assert len(row.tokens) == len(row.logprobs) == len(row.sampling_logprobs) > 0
        rollout.tokens.extend(row.tokens)
        rollout.logprobs.extend(row.logprobs)
        rollout.sampling_logprobs.extend(row.sampling_logprobs)
        rollout.versions.extend([row.version] * len(row.tokens))
        rollout.routes.extend(row.routes)
        rollout.finish_clock, rollout.finish_reason = row.finish_clock, row.finish_reason


def new_rounds(
    model: RoleModel, cache: SequenceCache, sampling: Sampling, stopping: Stopping, *, tokens: int = 16, sync_steps: int = 1
) -> RoundRunner:
    return decoder(
        model, cache, sampling=sampling, stopping=stopping, micro_batch_tokens=tokens, timeout_s=60.0, sync_steps=sync_steps
    )


def runner(model: RoleModel, sampling: Sampling, variant: Variant) -> RoundRunner:
    stopping = Stopping((EOS,), MAX_RESPONSE)
    rounds = new_rounds(model, model.new_cache(variant.slots), sampling, stopping, tokens=variant.prefill_tokens)
    rounds.planner.weave = (variant.micro_batches, "auto")
    return rounds


def decode_round(
    rounds: RoundRunner, rollouts: Sequence[Rollout], max_steps: int, clock: int, version: int, needed: int = NEVER
) -> Chunk:
    chunk = rounds.run(rollouts, [], max_steps, Decoding(clock, version, lambda: Finishers(needed)))
    assert chunk is not None
    apply(chunk, {r.seq_id: r for r in rollouts})
    rounds.recorded(rollouts)
    return chunk


def new_rollouts() -> dict[int, Rollout]:
    return {50 + i: Rollout(Prompt(50 + i, i, "", tokens), i) for i, tokens in enumerate(PROMPTS)}


def finish(rounds: RoundRunner, rollouts: dict[int, Rollout], variant: Variant) -> None:
    version = clock = 0
    while running := [r for r in rollouts.values() if not r.finished]:
        order = running[::-1] if variant.reverse else running
        chunk = decode_round(rounds, order, variant.max_steps, clock, version)
        assert chunk.index == rounds.num_rounds and clock < chunk.clock <= clock + variant.max_steps
        version, clock = version + 1, chunk.clock
        if variant.forget:
            rounds.actor_changed()
    assert rounds.decode is not None and not rounds.decode.cache.seq_ids


def decode(model: RoleModel, sampling: Sampling, variant: Variant) -> dict[int, Rollout]:
    rounds = runner(model, sampling, variant)
    rollouts = new_rollouts()
    for part in [{k: r} for k, r in rollouts.items()] if variant.alone else [rollouts]:
        finish(rounds, part, variant)
    rounds.executor.finish_sends()
    return rollouts


def every_variant(directory: str, tp: int, pp: int, samplings: dict[str, Sampling], variants: list[str]) -> dict[str, Any]:
    """sampling/variant -> sequence id -> (tokens, reason)."""
    groups, answers = world_groups(tp, pp), {}
    for path in PATHS:
        model = load(directory, groups, path=path)
        for name, sampling in samplings.items():
            for label in variants if path == "packed" else ["plain"]:
                rollouts = decode(model, sampling, VARIANTS[label])
                answers[f"{name}/{label}/{path}"] = {k: (r.tokens, r.finish_reason) for k, r in rollouts.items()}
    return answers


def logprob_gaps(directory: str, tp: int, pp: int, samplings: dict[str, Sampling]) -> dict[str, Any]:
    """sampling -> tokens, recorded log-probs and, on the last stage, the training forward's log-probs and logits."""
    model = load(directory, world_groups(tp, pp))
    return {name: _against_training(model, sampling) for name, sampling in samplings.items()}


def _against_training(model: RoleModel, sampling: Sampling) -> dict[str, Any]:
    rollouts = list(decode(model, sampling, Variant(max_steps=7, slots=4)).values())
    lengths = [len(r.tokens) for r in rollouts]
    batches = pack_responses([r.prompt.tokens for r in rollouts], [r.tokens for r in rollouts], 60, CPU)
    logprobs = forward_rows(model, batches, lambda b, out: out.figures(b.targets_R, sampling.temperature).logp_R)
    logits = forward_rows(model, batches, lambda _, out: gather_logits(whole_logits(out), model.vocab))
    assert all(r.versions == sorted(r.versions) and len(r.versions) == len(r.tokens) for r in rollouts)
    answer = {
        "tokens": [t for r in rollouts for t in r.tokens], "logprobs": [x for r in rollouts for x in r.logprobs],
        "sampling_logprobs": [x for r in rollouts for x in r.sampling_logprobs],
    }  # fmt: skip
    if model.groups.is_last_stage:
        answer["training"] = join_rows(logprobs, lengths, batches).tolist()
        answer["logits"] = join_rows(logits, lengths, batches).tolist()
    return answer


def early_end(directory: str, tp: int, pp: int, micro_batches: int) -> dict[str, Any]:
    model = load(directory, world_groups(tp, pp))
    rounds, rollouts = runner(model, Sampling(seed=7), Variant(micro_batches=micro_batches)), new_rollouts()
    assert rounds.decode is not None
    outlet = ChunkOutlet(CPU)
    outlet.admit(list(rollouts.values()))
    first = decode_round(rounds, list(rollouts.values()), NEVER, clock=100, version=0, needed=2)
    cache = rounds.decode.cache
    cached = {seq_id: cache.length(seq_id) for seq_id in cache.seq_ids}
    summary = {k: (len(r.tokens), r.finish_clock) for k, r in rollouts.items()}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    model.end_weight_update()
    rounds.actor_changed()
    assert all(cache.length(seq_id) == 0 for seq_id in cache.seq_ids)
    left = [r for r in rollouts.values() if not r.finished]
    second = decode_round(rounds, left, NEVER, clock=first.clock, version=1)
    rounds.executor.finish_sends()
    done = list(rollouts.values())
    answer = {
        "clock": first.clock, "cached": cached, "summary": summary, "tokens": [r.tokens for r in done],
        "versions": [v for r in done for v in r.versions],
        "sent": [part.tolist() for chunk in (first, second) for part in outlet.message(chunk)],
    }  # fmt: skip
    batches = pack_responses([r.prompt.tokens for r in done], [r.tokens for r in done], 60, CPU)
    fresh = forward_rows(model, batches, lambda b, out: out.figures(b.targets_R).logp_R)
    if model.groups.is_last_stage:
        recorded = torch.tensor([x for r in done for x in r.logprobs])
        answer["gaps"] = (join_rows(fresh, [len(r.tokens) for r in done], batches) - recorded).tolist()
    return answer


SAMPLINGS = {
    "whole": Sampling(seed=7), "cool": Sampling(0.7, seed=7), "cool, truncated": Sampling(0.7, top_k=9, top_p=0.8, seed=7),
    "truncated": Sampling(1.0, top_k=9, seed=8), "greedy": Sampling(0.0),
}  # fmt: skip
LOGPROB_TOLERANCE = 1e-4


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2)]
layouts = pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [pytest.param(*layout, marks=[pytest.mark.long] if layout in LAYOUTS[3::2] else []) for layout in LAYOUTS],
    ids=[f"tp{tp}-pp{pp}-dp{dp}" for tp, pp, dp in LAYOUTS],
)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    return {}


@layouts
def test_draws_depend_on_seed_and_place(models: dict[str, str], tp: int, pp: int, dp: int, drawn: dict[str, Any]) -> None:
    chosen = {name: SAMPLINGS[name] for name in ("whole", "truncated")}
    few = ["plain", "two slots", "cache forgotten each round", "two micro-batches"]
    labels = list(VARIANTS) if (tp, pp, dp) == (1, 1, 1) else few
    answers = run_ranks(
        tp * pp * dp, f"{JOBS}every_variant", directory=models["qwen2"], tp=tp, pp=pp, samplings=chosen, variants=labels,
    )  # fmt: skip
    assert all(answer == answers[0] for answer in answers)  # every rank keeps the same books
    for name in chosen:
        plain = drawn.setdefault(name, answers[0][f"{name}/plain/packed"])
        variants = {key: value for key, value in answers[0].items() if key.startswith(f"{name}/")}
        assert len(variants) == len(labels) + 2
        for label, rollouts in variants.items():
            assert rollouts == plain, label
        lengths = [len(tokens) for tokens, _ in plain.values()]
        assert len(set(lengths)) > 2 and len({tuple(tokens) for tokens, _ in plain.values()}) == len(PROMPTS)
        for tokens, reason in plain.values():
            assert EOS not in tokens[:-1]
            assert (tokens[-1] == EOS and reason == "eos") or (len(tokens) == MAX_RESPONSE and reason == "length")


@pytest.mark.long
def test_a_vocabulary_that_tensor_ranks_do_not_divide_is_drawn_from_alike(tmp_path: Path) -> None:
    """No draw falls on a row that belongs to no token, and none is moved by such rows."""
    save_small(tmp_path, "qwen3", vocab_size=67)
    found = {}
    for tp, pp in [(1, 1), (4, 1), (2, 2)]:
        job: dict[str, Any] = dict(directory=str(tmp_path), tp=tp, pp=pp, samplings=SAMPLINGS)
        answers = run_ranks(tp * pp, f"{JOBS}every_variant", variants=["plain"], **job)
        assert all(answer == answers[0] for answer in answers)
        found[tp, pp] = answers[0]
    drawn = [token for tokens, _ in found[1, 1]["whole/plain/packed"].values() for token in tokens]
    assert max(drawn) > 51, "the last shard is drawn from"
    assert found[4, 1] == found[1, 1] == found[2, 2]


@pytest.mark.parametrize("model", ["mistral", "gpt-oss"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_greedy_responses_through_a_window_are_those_of_transformers(
    models: dict[str, str], model: str, tp: int, pp: int
) -> None:
    labels = ["plain", "two slots", "cache forgotten each round"] if tp == 1 else ["plain"]
    job: dict[str, Any] = dict(directory=models[model], tp=tp, pp=pp, samplings={"greedy": Sampling(0.0)})
    (answer, *_) = run_ranks(tp * pp, f"{JOBS}every_variant", variants=labels, **job)
    theirs = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        settings: dict[str, Any] = {"max_new_tokens": MAX_RESPONSE, "do_sample": False, "eos_token_id": EOS}
        expected.append(theirs.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist())
    for label, rollouts in answer.items():
        assert [tokens for tokens, _ in rollouts.values()] == expected, label
    assert max(map(len, expected)) > 6, "the window leaves something out"


@layouts
def test_recorded_log_probs_are_those_of_the_training_forward(models: dict[str, str], tp: int, pp: int, dp: int) -> None:
    others = ("llama", "mistral", "mixtral", "phi3") if (tp, pp, dp) == (1, 1, 1) else ("qwen3-moe",)
    for model in ("qwen3", *others):
        answers = run_ranks(tp * pp * dp, f"{JOBS}logprob_gaps", directory=models[model], tp=tp, pp=pp, samplings=SAMPLINGS)
        speakers = [answer for answer in answers if "training" in answer["whole"]]
        assert len(speakers) == tp * dp
        for answer in speakers:
            for name, sampling in SAMPLINGS.items():
                check_log_probs(answer[name], sampling)


def check_log_probs(answer: dict[str, Any], sampling: Sampling) -> None:
    assert answer["logprobs"] == pytest.approx(answer["training"], abs=LOGPROB_TOLERANCE)
    rows = zip(answer["tokens"], answer["sampling_logprobs"], answer["logits"], strict=True)
    if sampling.temperature == 0:
        for token, sampled, logits in rows:
            assert logits[token] == max(logits) and sampled == 0
    elif sampling.top_k or sampling.top_p < 1:
        for token, sampled, logits in rows:
            assert sampled == pytest.approx(math.log(plain_truncation(logits, sampling)[token]), abs=LOGPROB_TOLERANCE)
        assert answer["sampling_logprobs"] != answer["logprobs"]
    else:
        assert answer["sampling_logprobs"] == answer["logprobs"]


ENDS = [(1, 1, 1, 1), (1, 1, 1, 3), (1, 2, 1, 2), (2, 1, 2, 1), (1, 2, 2, 2)]


@pytest.fixture(scope="module")
def ended() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("tp", "pp", "dp", "micro_batches"), ENDS)
def test_a_round_ends_with_the_batch_and_goes_on_under_new_weights(
    models: dict[str, str], tp: int, pp: int, dp: int, micro_batches: int, ended: dict[str, Any]
) -> None:
    answers = run_ranks(tp * pp * dp, f"{JOBS}early_end", directory=models["qwen2"], tp=tp, pp=pp, micro_batches=micro_batches)
    cached: dict[int, int] = {}
    for answer in answers:
        cached |= answer.pop("cached")
        gaps = answer.pop("gaps", None)
        if gaps is not None:
            fresh, stale = ([abs(x) for x, v in zip(gaps, answer["versions"], strict=True) if v == k] for k in (1, 0))
            assert max(fresh) < LOGPROB_TOLERANCE < max(stale), "tokens that are drawn later have the new weights' log-probs"
    answer = answers[0]
    assert all(other == answer for other in answers), "each rank would send the same message, to the bit"
    assert len(answer.pop("sent")) == 4
    finished = {k: (n, clock) for k, (n, clock) in answer["summary"].items() if clock is not None}
    num_steps = answer["clock"] - 100
    assert len(finished) >= 2 and max(clock for _, clock in finished.values()) == answer["clock"]
    for num_tokens, clock in finished.values():
        assert clock == 100 + num_tokens  # one token a step from the first
    prompts = {50 + i: len(tokens) for i, tokens in enumerate(PROMPTS)}
    running = set(answer["summary"]) - set(finished)
    assert running and all(answer["summary"][k][0] == num_steps for k in running)
    assert cached == {k: prompts[k] + num_steps - 1 for k in running} and ended.setdefault("answer", answer) == answer
