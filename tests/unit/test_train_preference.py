"""Preference training without a model: micro-batches, KTO's mismatched rows, and the file of the reference's log-probs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oppo_megatron.config.supervised import DPOConfig
from oppo_megatron.data.supervised_rows import Marked, Pair
from oppo_megatron.train.reference_pass import UnusableFileError, key_of, missing_answers, read_logprobs, write_logprobs
from oppo_megatron.train.supervised_tasks import MarkedPreferences, PairPreferences, Preferences

CPU = torch.device("cpu")


def pairs() -> PairPreferences:
    return PairPreferences(DPOConfig.model_validate(settings()))


def marked(loss: str = "kto") -> MarkedPreferences:
    return MarkedPreferences(DPOConfig.model_validate(settings() | {"dpo": {"loss": loss}}))


def settings() -> dict[str, Any]:
    return {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"checkpoint": "m"}, "max_tokens": 8}


def know(task: Preferences[Any], rows: list[Any]) -> dict[bytes, float]:
    """Give the reference's log-probs of the rows' answers: -1, -2, ..."""
    missing = missing_answers(task.reference, (answer for row in rows for answer in task.answers(row)))
    task.reference.update({key: -float(number) for number, key in enumerate(missing, start=1)})
    return task.reference


def test_a_pair_is_in_one_micro_batch_with_the_references_log_probs() -> None:
    rows = [Pair([1] * n, [2] * (n % 5 + 1), [3] * (n % 3 + 1)) for n in range(1, 30)]
    task = pairs()
    know(task, rows)
    micros = task.micro_batches(rows, 70, CPU)
    assert sorted(i for micro in micros for i in micro.index) == list(range(len(rows)))
    assert len(micros) > 5 and all(len(micro.tokens_T) <= 70 for micro in micros)
    for micro in micros:
        answered = [answer for i in micro.index for answer in task.answers(rows[i])]
        assert micro.tokens_T.tolist() == [token for prompt, answer in answered for token in [*prompt, *answer][:-1]]
        assert micro.targets_R.tolist() == [token for _, answer in answered for token in answer], "the EOS, too"
        assert micro.counts == [len(answer) for _, answer in answered] == micro.extra["counts"].tolist()
        assert micro.extra["reference"].tolist() == [task.reference[key_of(*each)] for each in answered]
        assert len(micro.tokens_T) == sum(task.num_tokens(rows[i]) for i in micro.index)
        assert len(micro.lengths) == 2 * len(micro.index)


def test_signs_follow_their_rows() -> None:
    rows = [Marked([1] * n, [2] * (1 + n % 4), [n % 2]) for n in range(1, 12)]
    task = marked()
    know(task, rows)
    for micro in task.micro_batches(rows, 30, CPU):
        assert micro.extra["sign"].tolist() == [1.0 if rows[i].wanted[0] else -1.0 for i in micro.index]
        assert len(micro.lengths) == len(micro.index)


def test_a_prompt_meets_the_completion_before_it_of_another_prompt() -> None:
    rows = [Marked([1], [11], [1]), Marked([2], [12], [0]), Marked([2], [13], [1]), Marked([3], [14], [0])]
    others = [(row.prompt, row.completion) for row in marked().mismatched(rows)]
    assert others == [([1], [14]), ([2], [11]), ([2], [11]), ([3], [13])]


def test_what_is_too_long_together_is_cut_and_where_there_is_nothing_to_meet_nothing_is_read() -> None:
    long = [Marked([1] * 5, [2, 3], [1]), Marked([4], [5, 6, 7, 8, 9, 0, 1], [0])]
    assert [row.completion for row in marked().mismatched(long)] == [[5, 6, 7], [2, 3]]
    assert marked().mismatched(long[:1]) == () == marked().mismatched([long[0], long[0]])
    assert marked("apo_zero_unpaired").mismatched(long) == ()


def test_keys_tell_prompt_from_answer() -> None:
    keys = [key_of([1, 2], [3]), key_of([1], [2, 3]), key_of([1, 2, 3], []), key_of([1, 2], [4]), key_of([2, 1], [3])]
    assert len(set(keys)) == len(keys) and all(len(key) == 16 for key in keys)
    assert list(missing_answers({}, [([1], [2]), ([1], [3]), ([1], [2])])) == [key_of([1], [2]), key_of([1], [3])]


def test_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    table = {key_of([n], [n + 1]): -n / 3 for n in range(50)}
    path = tmp_path / "folder" / "logprobs.safetensors"
    write_logprobs(path, table, "abc")
    assert read_logprobs(path, "abc") == table
    more = table | {key_of([7], [8, 9]): -1e-300}
    write_logprobs(path, more, "abc")
    assert read_logprobs(path, "abc") == more and os.listdir(path.parent) == [path.name]


def test_a_file_of_no_use_says_why(tmp_path: Path) -> None:
    path = tmp_path / "logprobs.safetensors"
    write_logprobs(path, {key_of([1], [2]): -1.0}, "a" * 64)
    with pytest.raises(
        UnusableFileError, match="is of another reference.*fingerprint aaaaaaaaaaaa, this run's reference bbbbbbbbbbbb"
    ):
        read_logprobs(path, "b" * 64)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    with pytest.raises(UnusableFileError, match="is damaged"):
        read_logprobs(path, "a" * 64)
    path.write_bytes(whole[:-5])
    with pytest.raises(UnusableFileError, match="not a readable file"):
        read_logprobs(path, "a" * 64)
    save_file({"keys": torch.zeros(1)}, path)
    with pytest.raises(UnusableFileError, match="is not a file of reference log-probs"):
        read_logprobs(path, "a" * 64)
    assert list(load_file(path)) == ["keys"], "what is not ours is left as it is"
