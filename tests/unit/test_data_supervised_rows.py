"""Supervised rows: EOS, over-long rows, and batches that give every row once an epoch."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.data import DataConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Completion, RowLoader, Steps, batches, num_batches
from oppo_megatron.errors import DataError
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer()
EOS = [TOKENIZER.eos_id]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def write(path: Path, *values: object) -> DataConfig:
    return DataConfig(path=write_rows(path, *values))


def loader(
    config: DataConfig, max_tokens: int = 100, long_rows: str = "error", quarantine: Quarantine | None = None
) -> RowLoader:
    config = config.model_copy(update={"long_rows": long_rows})
    return RowLoader(config, TOKENIZER, max_tokens, quarantine if quarantine is not None else Quarantine())


def completions(config: DataConfig, *more: Any, **settings: Any) -> list[Completion]:
    return loader(config, *more, **settings).completions()


def answered(answer: str) -> tuple[dict[str, Any], str]:
    return {"question": "q", "answer": answer}, "q"


TURNS = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}, "<user>hi\3\n<assistant>"


@pytest.mark.parametrize(
    ("eos_ids", "row", "completion"),
    [
        ((3,), answered("abc"), "abc\3"),
        ((3,), answered("abc\3"), "abc\3"),
        ((3,), answered("a\3c"), "a\3c\3"),
        ((3, 4), answered("abc\4"), "abc\4"),
        ((3, 4), answered("a\4c"), "a\4c\3"),
        ((3,), TURNS, "yo\3"),  # without the line break that the template writes after EOS
        ((4,), TURNS, "yo\3\n\4"),  # the template's end of turn is not EOS
        ((4, 3), TURNS, "yo\3"),
    ],
)
def test_a_completion_ends_with_one_eos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eos_ids: tuple[int, ...], row: tuple[Any, str], completion: str
) -> None:
    monkeypatch.setattr(CharacterTokenizer, "eos_id", eos_ids[0])
    monkeypatch.setattr(CharacterTokenizer, "eos_ids", eos_ids)
    quarantine = Quarantine()
    assert completions(write(tmp_path, row[0]), quarantine=quarantine) == [(ids(row[1]), ids(completion))]
    assert quarantine.first["prompt"] == row[1]
    assert row is not TURNS or quarantine.first["completion"] == TOKENIZER.decode(ids(completion)), "shown as it is trained on"


def test_a_row_that_was_set_aside_is_not_shown(tmp_path: Path) -> None:
    quarantine = Quarantine()
    rows = [{"question": "long " * 20, "answer": "a"}, {"question": "q", "answer": "abc"}]
    completions(write(tmp_path, *rows), 20, "quarantine", quarantine)
    assert quarantine.first["prompt"] == "q" and quarantine.first["completion"].startswith("abc")


def test_pairs(tmp_path: Path) -> None:
    config = write(tmp_path, {"prompt": "q", "chosen": "yes", "rejected": "no"})
    assert loader(config, 5).pairs() == [(ids("q"), ids("yes") + EOS, ids("no") + EOS)]
    with pytest.raises(DataError, match="5 tokens, more than max_tokens=4"):
        loader(config, 4).pairs()


def test_long_rows_under_each_policy(tmp_path: Path) -> None:
    config = write(tmp_path, {"prompt": "abcdef", "completion": "123"}, {"prompt": "a", "completion": "1"})
    assert len(completions(config, 10)) == 2, "exactly max_tokens fits"
    with pytest.raises(DataError, match=r"1 row.*\n.*rows.jsonl:1: .*10 tokens.*\n.*long_rows=quarantine"):
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
    config = write(tmp_path_factory.mktemp("cut"), {"prompt": prompt, "chosen": chosen, "rejected": rejected})
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


def steps(config: DataConfig, *more: Any, **settings: Any) -> list[Steps]:
    return loader(config, *more, **settings).steps("\n")


def test_labels_lie_at_the_ends_that_a_policys_response_has(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completions": ["ab", "cd", "e"], "labels": [True, 0.25, False]},
        {"prompt": "q", "completions": ["ab", "cd\n"], "labels": [None, 1]},
        {"prompt": [{"role": "user", "content": "hi"}], "completions": ["a", "b"], "labels": [1, 0]},
    ]
    assert steps(write(tmp_path, *rows)) == [
        Steps(ids("q"), ids("ab\ncd\ne") + EOS, [2, 5, 7], [1.0, 0.25, 0.0]),
        Steps(ids("q"), ids("ab\ncd\n") + EOS, [5], [1.0]),
        Steps(ids("<user>hi\3\n<assistant>"), ids("a\nb") + EOS, [1, 3], [1.0, 0.0]),
    ]


def test_of_a_row_that_is_cut_the_whole_steps_are_left(tmp_path: Path) -> None:
    config = write(tmp_path, {"prompt": "q", "completions": ["ab", "cd", "ef"], "labels": [1, 0, 0]})
    assert steps(config, 8, "truncate") == [Steps(ids("q"), ids("ab\ncd\ne"), [2, 5], [1.0, 0.0])]
    with pytest.raises(DataError, match="no step with a label ends within max_tokens=3"):
        steps(config, 3, "truncate")
    with pytest.raises(DataError, match="have 10 tokens, more than max_tokens=9"):
        steps(config, 9)


def test_rows_with_other_steps_than_labels_are_set_aside(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completions": ["a\nb"], "labels": [1]}, {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0]}]
    config, quarantine = write(tmp_path, *rows), Quarantine()
    config = config.model_copy(update={"bad_rows": "quarantine"})
    assert steps(config, quarantine=quarantine) == [Steps(ids("q"), ids("a\nb") + EOS, [1, 3], [1.0, 0.0])]
    (entry,) = quarantine.entries
    assert entry["line"] == 1 and "2 steps by the separator '\\n', but the row has 1" in entry["reason"]
    assert quarantine.first == {"prompt": "q", "completion": TOKENIZER.decode(ids("a\nb") + EOS)}
