"""Prompt sets and the stream: lengths, order, identity over epochs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.clock import ByTime, by_time
from oppo_megatron.config.data import DataConfig, PromptDataConfig
from oppo_megatron.data.prompts import PromptSet, PromptStream, epoch_order, load_prompts
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Completion, RowLoader
from oppo_megatron.errors import DataError, RewardError
from oppo_megatron.records import Prompt
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer()


def plain_set(num_rows: int, responses_per_prompt: int = 1) -> PromptSet:
    rows = [Prompt(-1, i, chr(97 + i), (97 + i,), {}, f"f:{i + 1}") for i in range(num_rows)]
    return PromptSet(rows, 0, 0, 0, responses_per_prompt)


def test_rows_become_prompts_with_their_other_columns(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"question": "ab", "answer": "1"}, {"question": "ab", "answer": "2", "id": 7})
    prompts = load_prompts(PromptDataConfig(path=path, prompt_template="Q{prompt}A"), TOKENIZER, quarantine=Quarantine())
    first, second = prompts.rows
    assert (first.text, first.tokens, first.fields) == ("QabA", tuple(map(ord, "QabA")), {"answer": "1"})
    assert second.fields == {"answer": "2", "id": 7} and second.place == f"{path}:2"
    assert prompts.num_duplicates == 1


def test_rows_are_told_of_by_time_at_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tick of the clock is 1 s, and each row is met three times: nothing is silent for longer than 5 s."""
    path = write_rows(tmp_path, *({"prompt": f"{n}", "completion": "c"} for n in range(10)))

    def completions(quarantine: Quarantine) -> list[Completion]:
        return RowLoader(DataConfig(path=path), TOKENIZER, 9, quarantine).completions()

    for load in (partial(load_prompts, PromptDataConfig(path=path), TOKENIZER), completions):
        told, seconds = list[str](), count()
        load(quarantine=Quarantine(progress=ByTime(told.append, clock=lambda: float(next(seconds)))))  # noqa: B023
        stages = ["reading", "reading", "rendered", "rendered", "tokenized", "tokenized"]
        assert all(stage in line for stage, line in zip(stages, told, strict=True)), told
        assert [line.rsplit(", ")[1] for line in told] == ["5s", "10s", "15s", "20s", "25s", "30s"]
    by_time(is_owner=False)("a line")
    assert capsys.readouterr() == ("", "")


def test_rows_that_a_check_refuses_fall_under_bad_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b"}, {"prompt": "c"})

    def check(fields: Mapping[str, Any]) -> None:
        if "answer" not in fields:
            raise RewardError("no answer here")

    with pytest.raises(DataError, match="(?s)2 rows.*rows.jsonl:2: no answer here.*rows.jsonl:3.*data.bad_rows=quarantine"):
        load_prompts(PromptDataConfig(path=path), TOKENIZER, quarantine=Quarantine(), check=check)
    quarantine = Quarantine()
    config = PromptDataConfig(path=path, bad_rows="quarantine")
    kept = load_prompts(config, TOKENIZER, quarantine=quarantine, check=check)
    assert [row.text for row in kept.rows] == ["a"]
    assert [entry["line"] for entry in quarantine.entries] == [2, 3]


def test_long_prompts_under_each_policy(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"prompt": "123456"}, {"prompt": "12345"}, {"prompt": "abcdefgh"})

    def load(policy: str, quarantine: Quarantine) -> PromptSet:
        config = PromptDataConfig(path=path, max_prompt_tokens=5, long_rows=policy)
        return load_prompts(config, TOKENIZER, quarantine=quarantine)

    with pytest.raises(DataError, match="(?s)2 rows.*jsonl:1: .*6 tokens.*max_prompt_tokens=5.*jsonl:3.*data.long_rows"):
        load("error", Quarantine())
    truncated = load("truncate", Quarantine())
    assert [row.text for row in truncated.rows] == ["23456", "12345", "defgh"], "the end is kept"
    assert truncated.num_truncated == 2
    assert all(row.tokens == tuple(TOKENIZER.encode(row.text)) for row in truncated.rows)
    quarantine = Quarantine()
    kept = load("quarantine", quarantine)
    assert [row.row for row in kept.rows] == [1] and kept.num_quarantined == 2
    assert [entry["line"] for entry in quarantine.entries] == [1, 3]


def test_bad_and_long_rows_are_reported_together(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"prompt": "123456"}, {"prompt": ""}, [], {"prompt": "ok"})
    with pytest.raises(DataError, match="3 rows") as caught:
        load_prompts(PromptDataConfig(path=path, max_prompt_tokens=5), TOKENIZER, quarantine=Quarantine())
    assert all(f"rows.jsonl:{line}:" in str(caught.value) for line in (1, 2, 3))
    assert "data.bad_rows=quarantine" in str(caught.value) and "data.long_rows=quarantine" in str(caught.value)


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"prompt": "long"}, {"prompt": "longer"})
    config = PromptDataConfig(path=path, max_prompt_tokens=1, long_rows="quarantine")
    with pytest.raises(DataError, match=r"all 2 rows were set aside.*rows\.jsonl:1"):
        load_prompts(config, TOKENIZER, quarantine=Quarantine([{"file": "earlier", "line": 9, "reason": "other"}]))


def test_real_questions(shared_data: Path) -> None:
    config = PromptDataConfig(path=shared_data / "gsm8k_train.jsonl")
    prompts = load_prompts(config, TOKENIZER, quarantine=Quarantine())
    assert len(prompts) == 7473
    assert all("####" in row.fields["answer"] for row in prompts.rows)


@given(
    num_rows=st.integers(1, 12),
    epochs=st.one_of(st.none(), st.integers(0, 4)),
    limit=st.one_of(st.none(), st.integers(0, 40)),
    start=st.integers(0, 50),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
)
def test_stream_is_a_permutation_per_epoch_and_resumes(
    num_rows: int, epochs: int | None, limit: int | None, start: int, seed: int, shuffle: bool
) -> None:
    prompts = plain_set(num_rows)
    ends = [40]
    ends += [] if epochs is None else [epochs * num_rows]
    ends += [] if limit is None else [limit]
    stream = PromptStream(prompts, seed, epochs=epochs, limit=limit, shuffle=shuffle)
    given_prompts = list(islice(stream, 40))
    assert [prompt.seq_id for prompt in given_prompts] == list(range(min(ends)))
    for epoch_start in range(0, len(given_prompts) - num_rows + 1, num_rows):
        rows = [prompt.row for prompt in given_prompts[epoch_start : epoch_start + num_rows]]
        assert sorted(rows) == list(range(num_rows))
        assert shuffle or rows == sorted(rows)
    resumed = PromptStream(prompts, seed, epochs=epochs, limit=limit, shuffle=shuffle, start=start)
    assert list(islice(resumed, max(0, 40 - start))) == given_prompts[start:]


@given(
    left_out=st.frozensets(st.integers(0, 30)),
    limit=st.one_of(st.none(), st.integers(0, 30)),
    epochs=st.integers(0, 5),
    start=st.integers(0, 20),
)
def test_what_is_left_out_of_a_stream_counts_for_nothing(
    left_out: frozenset[int], limit: int | None, epochs: int, start: int
) -> None:
    plain = list(PromptStream(plain_set(7), 3, epochs=epochs))
    stream = PromptStream(plain_set(7), 3, epochs=epochs, limit=limit, left_out=left_out)
    kept = [prompt for prompt in plain if prompt.seq_id not in left_out][:limit]
    given_prompts = list(stream)
    assert given_prompts == kept and stream.planned == (7 * epochs if limit is None else min(limit, 7 * epochs))
    resumed = PromptStream(plain_set(7), 3, epochs=epochs, limit=limit, left_out=left_out, start=start)
    assert list(resumed) == [prompt for prompt in kept if prompt.seq_id >= start]


@given(num_rows=st.integers(1, 9), responses=st.integers(2, 5), epochs=st.integers(1, 3), start=st.integers(0, 40))
def test_responses_of_a_prompt_follow_each_other_under_positions_of_their_own(
    num_rows: int, responses: int, epochs: int, start: int
) -> None:
    once = [prompt.row for prompt in PromptStream(plain_set(num_rows), 3, epochs=epochs)]
    prompts = plain_set(num_rows, responses)
    stream = PromptStream(prompts, 3, epochs=epochs)
    given_prompts = list(stream)
    assert stream.planned == len(given_prompts) == epochs * prompts.rollouts_per_pass
    assert [prompt.row for prompt in given_prompts] == [row for row in once for _ in range(responses)]
    assert [prompt.seq_id for prompt in given_prompts] == list(range(len(given_prompts)))
    assert list(PromptStream(prompts, 3, epochs=epochs, start=start)) == given_prompts[start:]


def test_order_depends_on_seed_and_epoch_and_never_on_the_platform() -> None:
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    # Philox4x64 is a published function: these words, and so this order, are the same everywhere.
    words = philox4x64(1, (1, 0)) + philox4x64(2, (1, 0))
    assert epoch_order(8, 1, 0) == sorted(range(8), key=words.__getitem__)
    with pytest.raises(ValueError, match="seed=-1"):
        epoch_order(3, -1, 0)
    with pytest.raises(DataError, match="empty"):
        PromptStream(plain_set(0), 1)


def philox4x64(counter: int, key: tuple[int, int]) -> list[int]:
    """Salmon et al. 2011, ten rounds, in plain integers."""
    mask = 2**64 - 1
    x, (k0, k1) = [counter & mask, counter >> 64, 0, 0], key
    for _ in range(10):
        high0, low0 = divmod(x[0] * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(x[2] * 0xCA5A826395121157, 2**64)
        x = [high1 ^ x[1] ^ k0, low1, high0 ^ x[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x
