"""A policy's answers to requests of one rank against transformers: log-probs, greedy flags and texts, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from oppo_megatron.cluster.world import World
from oppo_megatron.config.model import ParallelConfig, RuntimeConfig
from oppo_megatron.policy.answering import build_place, load_policy
from oppo_megatron.policy.answers import Drawing
from oppo_megatron.policy.finding import find_policy, policy_tokenizer
from tests.support.hf import save_tiny
from tests.support.ranks import run_ranks
from tests.support.tokenizers import save_byte_level

MOST = 24
Pairs = list[tuple[list[int], list[int]]]


def answers(directory: Path, pairs: Pairs, stop: tuple[str, ...], parallel: dict[str, int]) -> list[Any] | None:
    """Scores in two requests, then texts, on the rank that leads; None elsewhere."""
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    policy, runtime = find_policy(directory), RuntimeConfig(micro_batch_tokens=90).with_threads(1)
    place = build_place(world, ParallelConfig(**parallel))
    loaded = load_policy(policy, place, runtime, policy_tokenizer(policy), 96)
    if not loaded.leads:
        while loaded.answer(None) is not None:
            pass
        return None
    told = list[str]()
    scores = [score for part in (pairs[:1], pairs[1:]) for score in loaded.answer((part, None, 0)) or ()]
    texts = loaded.answer((pairs, Drawing(MOST, stop=stop), 2), told.append)
    assert told[-1] == f"{len(pairs)} of {len(pairs)} responses" and loaded.answer(None) is None
    return [scores, texts]


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}], ids=["one", "TP2", "PP2", "DP2"])
def test_requests_of_one_rank_are_answered_by_all_as_transformers_does(tmp_path: Path, parallel: dict[str, int]) -> None:
    save_byte_level(tmp_path, ["a cat and a dog", "two cats"], 275)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = save_tiny(tmp_path, "qwen2", vocab_size=len(tokenizer))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    pairs, texts, expected = Pairs(), list[str](), list[tuple[float, bool]]()
    for length in (1, 5, 40, 17, 9):
        context = torch.randint(2, len(tokenizer), (length,), generator=generator)
        written = model.generate(
            context[None], attention_mask=torch.ones(1, length), do_sample=False, max_new_tokens=MOST, pad_token_id=0,
            eos_token_id=tokenizer.eos_token_id,
        )[0, length:]  # fmt: skip
        texts.append(tokenizer.decode(written, skip_special_tokens=True))
        other = torch.randint(2, len(tokenizer), (length % 4 + 1,), generator=generator)
        pairs += [(context.tolist(), written[:6].tolist()), (context.tolist(), [*written[:3].tolist(), *other.tolist()])]
    for context, continuation in pairs:
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *continuation[:-1]]])).logits[0, len(context) - 1 :].double()
        wanted = torch.tensor(continuation)
        logp = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum()
        expected.append((float(logp), bool((logits.argmax(-1) == wanted).all())))
    assert [greedy for _, greedy in expected] == [True, False] * 5
    stop = tuple({text[4:6] for text in texts[::2]})
    ranks = 2 if parallel else 1
    found = run_ranks(ranks, "tests.parity.test_answers:answers", directory=tmp_path, pairs=pairs, stop=stop, parallel=parallel)
    ((scores, ours),) = [each for each in found if each is not None]
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert [logp for logp, _ in scores] == pytest.approx([logp for logp, _ in expected], abs=2e-5)
    for place, text in enumerate(ours):
        whole = texts[place // 2]
        ends = [whole.index(each) for each in stop if each in whole]
        assert whole.startswith(text) and (len(text) >= min(ends) if ends else text == whole)
        assert not ends or len(text) < len(whole), "a text of `stop` ends a response"
