"""Supervised rows: EOS, over-long rows, and batches that give every row once an epoch."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.data import DataConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import RowLoader, Steps, batches, num_batches
from oppo_megatron.errors import DataError
from tests.support.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer()
EOS = [TOKENIZER.eos_id]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def write(path: Path, *values: object) -> DataConfig:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return DataConfig(path=path)


def loader(
    config: DataConfig, max_tokens: int = 100, long_rows: str = "error", quarantine: Quarantine | None = None
) -> RowLoader:
    config = config.model_copy(update={"long_rows": long_rows})
    return RowLoader(config, TOKENIZER, max_tokens, quarantine if quarantine is not None else Quarantine())


def completions(config: DataConfig, max_tokens: int = 100, long_rows: str = "error", quarantine: Quarantine | None = None):
    return loader(config, max_tokens, long_rows, quarantine).completions()


def test_a_completion_ends_with_one_eos(tmp_path: Path) -> None:
    config = write(
        tmp_path / "c.jsonl",
        {"question": "q", "answer": "abc"},
        {"question": "q", "answer": "abc\3"},
        {"question": "q", "answer": "a\3c"},
    )
    assert completions(config) == [(ids("q"), ids("abc") + EOS), (ids("q"), ids("abc") + EOS), (ids("q"), ids("a\3c") + EOS)]


def test_each_id_that_ends_a_response_ends_a_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CharacterTokenizer, "eos_ids", (3, 4))
    config = write(tmp_path / "c.jsonl", {"question": "q", "answer": "abc\4"}, {"question": "q", "answer": "a\4c"})
    assert completions(config) == [(ids("q"), ids("abc\4")), (ids("q"), ids("a\4c") + EOS)]


def test_what_a_chat_template_writes_after_its_eos_is_left_out(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert completions(write(tmp_path / "c.jsonl", {"messages": turns})) == [(ids("<user>hi\3\n<assistant>"), ids("yo") + EOS)]


def test_an_end_of_turn_that_ends_no_response_is_followed_by_the_eos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CharacterTokenizer, "eos_id", 4)
    monkeypatch.setattr(CharacterTokenizer, "eos_ids", (4,))
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    config = write(tmp_path / "c.jsonl", {"messages": turns})
    assert completions(config) == [(ids("<user>hi\3\n<assistant>"), ids("yo\3\n\4"))]
    monkeypatch.setattr(CharacterTokenizer, "eos_ids", (4, 3))
    assert completions(config) == [(ids("<user>hi\3\n<assistant>"), ids("yo\3"))]


def test_the_first_row_is_shown_as_it_is_trained_on(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    quarantine = Quarantine()
    [(_, completion)] = completions(write(tmp_path / "c.jsonl", {"messages": turns}), quarantine=quarantine)
    shown = TOKENIZER.decode(completion)
    assert quarantine.first == {"prompt": "<user>hi\3\n<assistant>", "completion": shown} and not shown.endswith("\n")


def test_a_row_that_was_set_aside_is_not_shown(tmp_path: Path) -> None:
    quarantine = Quarantine()
    rows = [{"question": "long " * 20, "answer": "a"}, {"question": "q", "answer": "abc"}]
    completions(write(tmp_path / "c.jsonl", *rows), 20, "quarantine", quarantine)
    assert quarantine.first["prompt"] == "q" and quarantine.first["completion"].startswith("abc")


def test_pairs(tmp_path: Path) -> None:
    config = write(tmp_path / "p.jsonl", {"prompt": "q", "chosen": "yes", "rejected": "no"})
    assert loader(config, 5).pairs() == [(ids("q"), ids("yes") + EOS, ids("no") + EOS)]
    with pytest.raises(DataError, match="5 tokens, more than max_tokens=4"):
        loader(config, 4).pairs()


def test_long_rows_under_each_policy(tmp_path: Path) -> None:
    config = write(tmp_path / "c.jsonl", {"prompt": "abcdef", "completion": "123"}, {"prompt": "a", "completion": "1"})
    assert len(completions(config, 10)) == 2, "exactly max_tokens fits"
    with pytest.raises(DataError, match=r"1 row.*\n.*c.jsonl:1: .*10 tokens.*\n.*long_rows=quarantine"):
        completions(config, 9)
    quarantine = Quarantine()
    assert completions(config, 9, "quarantine", quarantine) == [(ids("a"), ids("1") + EOS)]
    assert [entry["line"] for entry in quarantine.entries] == [1]
    with pytest.raises(DataError, match="all 2 rows"):
        completions(config, 2, "quarantine")


@given(
    prompt=st.text("abc", min_size=1, max_size=30),
    chosen=st.text("xyz", min_size=1, max_size=30),
    rejected=st.text("xyz", min_size=1, max_size=30),
    max_tokens=st.integers(2, 40),
)
def test_truncation_keeps_the_prompts_end_and_the_answers_beginning(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, chosen: str, rejected: str, max_tokens: int
) -> None:
    config = write(tmp_path_factory.mktemp("cut") / "p.jsonl", {"prompt": prompt, "chosen": chosen, "rejected": rejected})
    ((cut, *answers),) = loader(config, max_tokens, "truncate").pairs()
    longest = max(len(chosen), len(rejected)) + 1
    assert cut and ids(prompt)[-len(cut) :] == cut
    assert len(cut) == min(len(prompt), max(max_tokens - longest, max_tokens // 2))
    for answer, text in zip(answers, (chosen, rejected), strict=True):
        whole = ids(text) + EOS
        assert answer == whole[: max_tokens - len(cut)] and answer


@given(
    num_rows=st.integers(1, 30),
    batch_size=st.integers(1, 12),
    epochs=st.floats(0.05, 4),
    max_steps=st.one_of(st.none(), st.integers(1, 20)),
    seed=st.integers(0, 99),
)
def test_batches_give_every_row_once_an_epoch(
    num_rows: int, batch_size: int, epochs: float, max_steps: int | None, seed: int
) -> None:
    steps = list(batches(num_rows, batch_size, seed, epochs, max_steps))
    assert steps == list(batches(num_rows, batch_size, seed, epochs, max_steps))
    assert len(steps) == num_batches(num_rows, batch_size, epochs, max_steps) >= 1
    assert all(len(step) == batch_size for step in steps[:-1]) and 1 <= len(steps[-1]) <= batch_size
    indices = [index for step in steps for index in step]
    if max_steps is None:
        assert len(indices) == math.ceil(epochs * num_rows)
    else:
        assert len(steps) <= max_steps
    for start in range(0, len(indices), num_rows):
        epoch = Counter(indices[start : start + num_rows])
        assert max(epoch.values()) == 1 and set(epoch) <= set(range(num_rows))


def test_epochs_are_shuffled_apart() -> None:
    (one, two) = batches(50, 50, seed=3, epochs=2, max_steps=None)
    assert one != two and one != sorted(one) and sorted(one) == sorted(two)
    assert next(batches(5, 5, seed=3, epochs=1, max_steps=None, shuffle=False)) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError):
        next(batches(0, 5, seed=3, epochs=1, max_steps=None))


def test_real_preference_pairs_and_solutions(shared_data: Path) -> None:
    config = DataConfig(path=shared_data / "gsm8k_preference_pairs.jsonl")
    pairs = loader(config, 10_000).pairs()
    assert len(pairs) == 2426 and all(pair.chosen != pair.rejected for pair in pairs)
    rows = completions(DataConfig(path=shared_data / "gsm8k_train.jsonl", max_rows=50), 10_000)
    assert len(rows) == 50 and all(row.completion[-1:] == EOS for row in rows)


def steps(config: DataConfig, max_tokens: int = 100, long_rows: str = "error", quarantine: Quarantine | None = None):
    return loader(config, max_tokens, long_rows, quarantine).steps("\n")


def test_labels_lie_at_the_ends_that_a_policys_response_has(tmp_path: Path) -> None:
    """The last step ends with EOS, a label that is null is none."""
    rows = [
        {"prompt": "q", "completions": ["ab", "cd", "e"], "labels": [True, 0.25, False]},
        {"prompt": "q", "completions": ["ab", "cd\n"], "labels": [None, 1]},
    ]
    assert steps(write(tmp_path / "s.jsonl", *rows)) == [
        Steps(ids("q"), ids("ab\ncd\ne") + EOS, [2, 5, 7], [1.0, 0.25, 0.0]),
        Steps(ids("q"), ids("ab\ncd\n") + EOS, [5], [1.0]),
    ]


def test_of_a_row_that_is_cut_the_whole_steps_are_left(tmp_path: Path) -> None:
    config = write(tmp_path / "s.jsonl", {"prompt": "q", "completions": ["ab", "cd", "ef"], "labels": [1, 0, 0]})
    assert steps(config, 8, "truncate") == [Steps(ids("q"), ids("ab\ncd\ne"), [2, 5], [1.0, 0.0])]
    with pytest.raises(DataError, match="no step with a label ends within max_tokens=3"):
        steps(config, 3, "truncate")
    with pytest.raises(DataError, match="have 10 tokens, more than max_tokens=9"):
        steps(config, 9)


def test_rows_with_other_steps_than_labels_are_set_aside(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completions": ["a\nb"], "labels": [1]}, {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0]}]
    config, quarantine = write(tmp_path / "s.jsonl", *rows), Quarantine()
    config = config.model_copy(update={"bad_rows": "quarantine"})
    assert steps(config, quarantine=quarantine) == [Steps(ids("q"), ids("a\nb") + EOS, [1, 3], [1.0, 0.0])]
    (entry,) = quarantine.entries
    assert entry["line"] == 1 and "2 steps by the separator '\\n', but the row has 1" in entry["reason"]
    assert quarantine.first == {"prompt": "q", "completion": TOKENIZER.decode(ids("a\nb") + EOS)}


def test_messages_as_prompts_and_steps_behind_them(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}], "completions": ["a", "b"], "labels": [1, 0]}
    assert steps(write(tmp_path / "s.jsonl", row)) == [
        Steps(ids("<user>hi\3\n<assistant>"), ids("a\nb") + EOS, [1, 3], [1.0, 0.0])
    ]
