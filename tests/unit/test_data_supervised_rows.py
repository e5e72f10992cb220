"""Rows of supervised training: EOS, over-long rows, batches, pairs that differ, labels; and the generated task."""

import json
import math
import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.data import DataConfig, TokenizerConfig
from oppo_megatron.data import generated
from oppo_megatron.data.generated import Problem, Shape, problems
from oppo_megatron.data.prompts import RowOrder
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Completion, Marked, Passed, RowLoader, Steps, batches, num_batches, split_rows
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece
from oppo_megatron.errors import DataError
from oppo_megatron.records import Source
from oppo_megatron.rewards.verifiers import verify
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer()
EOS = [TOKENIZER.eos_id]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def write(path: Path, *values: object) -> DataConfig:
    return DataConfig(path=write_rows(path, *values))


def loader(config: DataConfig, most: int = 100, long_rows: str = "error", quarantine: Quarantine | None = None) -> RowLoader:
    config = config.model_copy(update={"long_rows": long_rows})
    return RowLoader(config, TOKENIZER, most, quarantine if quarantine is not None else Quarantine())


def completions(config: DataConfig, *more: Any, **settings: Any) -> list[Completion]:
    return loader(config, *more, **settings).completions()


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(("eos_ids", "answer", "completion"), [
    ((3,), "abc", "abc\3"), ((3,), "abc\3", "abc\3"), ((3,), "a\3c", "a\3c\3"), ((3, 4), "abc\4", "abc\4"),
    ((3, 4), "a\4c", "a\4c\3"), ((3,), None, "yo\3"),  # without the line break that the template writes after EOS
    ((4,), None, "yo\3\n\4"),  # the template's end of turn is not EOS
    ((4, 3), None, "yo\3"),
])  # fmt: skip
def test_a_completion_ends_with_one_eos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eos_ids: tuple[int, ...], answer: str | None, completion: str
) -> None:
    monkeypatch.setattr(CharacterTokenizer, "eos_id", eos_ids[0])
    monkeypatch.setattr(CharacterTokenizer, "eos_ids", eos_ids)
    prompt, row = (
        ("<user>hi\3\n<assistant>", {"messages": TURNS}) if answer is None else ("q", {"question": "q", "answer": answer})
    )
    quarantine = Quarantine()
    assert completions(write(tmp_path, row), quarantine=quarantine) == [(ids(prompt), ids(completion))]
    assert quarantine.first["prompt"] == prompt
    assert answer is not None or quarantine.first["completion"] == TOKENIZER.decode(ids(completion)), "as it is trained on"


def test_long_rows_under_each_policy(tmp_path: Path) -> None:
    pairs = write(tmp_path, {"prompt": "q", "chosen": "yes", "rejected": "no"})
    assert loader(pairs, 5).pairs() == [(ids("q"), ids("yes") + EOS, ids("no") + EOS)]
    with pytest.raises(DataError, match="5 tokens, more than max_tokens=4"):
        loader(pairs, 4).pairs()
    config = write(tmp_path, {"prompt": "abcdef", "completion": "123"}, {"prompt": "a", "completion": "1"})
    assert len(completions(config, 10)) == 2, "exactly max_tokens fits"
    with pytest.raises(DataError, match=r"1 row.*\n.*rows.jsonl:1: .*10 tokens.*\n.*long_rows=quarantine"):
        completions(config, 9)
    quarantine = Quarantine()
    assert completions(config, 9, "quarantine", quarantine) == [(ids("a"), ids("1") + EOS)]
    assert [entry["line"] for entry in quarantine.entries] == [1]
    assert quarantine.first == {"prompt": "a", "completion": "1"}, "a row that was set aside is not shown"
    with pytest.raises(DataError, match="all 2 rows"):
        completions(config, 2, "quarantine")


@given(
    prompt=st.text("abc", min_size=1, max_size=30), chosen=st.text("xyz", min_size=1, max_size=30),
    rejected=st.text("xyz", min_size=1, max_size=30), max_tokens=st.integers(2, 40),
)  # fmt: skip
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
    num_rows=st.integers(1, 30), batch_size=st.integers(1, 12), epochs=st.floats(0.05, 4),
    max_steps=st.one_of(st.none(), st.integers(1, 20)), seed=st.integers(0, 99),
)  # fmt: skip
def test_batches_give_every_row_once_an_epoch(num_rows: int, batch_size: int, epochs: float, max_steps: Any, seed: int) -> None:
    order = RowOrder([Source()] * num_rows, seed)
    steps = list(batches(order, batch_size, epochs, max_steps))
    assert steps == list(batches(order, batch_size, epochs, max_steps))
    assert len(steps) == num_batches(order, batch_size, epochs, max_steps) >= 1
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
    (one, two) = batches(RowOrder([Source()] * 50, 3), 50, epochs=2, max_steps=None)
    assert one != two and one != sorted(one) and sorted(one) == sorted(two)
    assert next(batches(RowOrder([Source()] * 5, 3, shuffle=False), 5, epochs=1, max_steps=None)) == [0, 1, 2, 3, 4]


@given(
    sources=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1.0, 1.5, 2.0, 3.25])), min_size=1, max_size=3),
    batch_size=st.integers(1, 7), epochs=st.floats(0.3, 3), seed=st.integers(0, 9), stop=st.integers(0, 20),
)  # fmt: skip
def test_weighted_batches_are_the_epochs_joined_and_go_on_after_any_step(
    sources: Any, batch_size: int, epochs: float, seed: int, stop: int
) -> None:
    order = RowOrder([Source(f"{n}", weight) for n, (rows, weight) in enumerate(sources) for _ in range(rows)], seed)
    steps = list(batches(order, batch_size, epochs, None))
    joined = [row for epoch in range(4) for row in order.epoch(epoch)]
    given_rows = math.ceil(epochs * sum(rows * weight for rows, weight in sources))
    assert [row for step in steps for row in step] == joined[:given_rows]
    stop = min(stop, len(steps))
    passed = Passed(stop, sum(map(len, steps[:stop])))
    assert list(batches(order, batch_size, epochs, None, passed)) == steps[stop:]


def test_each_row_keeps_the_weight_and_place_of_its_file_and_held_out_rows_leave_it(tmp_path: Path) -> None:
    for name in ("a", "b0", "b1"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name}{n}", "completion": "c"}}\n' for n in range(4)))
    (tmp_path / "b0.jsonl").open("a").write("[]\n")
    config = DataConfig.model_validate(
        {"path": [tmp_path / "a.jsonl", {"path": tmp_path / "b*.jsonl", "weight": 2}], "bad_rows": "quarantine"}
    )
    rows = loader(config).completions()
    pattern = Source(f"{tmp_path / 'b*.jsonl'}", 2.0)
    assert rows.sources == [Source(f"{tmp_path / 'a.jsonl'}", 1.0)] * 4 + [pattern] * 8
    assert [origin.place for origin in rows.origins][3:5] == [f"{tmp_path / 'a.jsonl'}:4", f"{tmp_path / 'b0.jsonl'}:1"]
    assert Counter(RowOrder(rows.sources).epoch(0)) == {place: 1 if place < 4 else 2 for place in range(12)}
    training, held = split_rows(rows, 0.25, 1)
    texts = {TOKENIZER.decode(row.prompt): origin for row, origin in zip(rows, rows.origins, strict=True)}
    for part in (training, held):
        assert [texts[TOKENIZER.decode(row.prompt)] for row in part] == part.origins
    assert len(held) == 3 and len(training) == 9


def test_real_preference_pairs_and_solutions(shared_data: Path) -> None:
    pairs = loader(DataConfig(path=shared_data / "gsm8k_preference_pairs.jsonl"), 10_000).pairs()
    assert len(pairs) == 2426 and all(pair.chosen != pair.rejected for pair in pairs)
    rows = completions(DataConfig(path=shared_data / "gsm8k_train.jsonl", max_rows=50), 10_000)
    assert len(rows) == 50 and all(row.completion[-1:] == EOS for row in rows)


def steps(config: DataConfig, *more: Any, **settings: Any) -> list[Steps]:
    return loader(config, *more, **settings).steps("\n")


def test_labels_lie_at_the_ends_of_a_policys_response_of_whole_steps_and_are_as_many_as_steps(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completions": ["ab", "cd", "e"], "labels": [True, 0.25, False]},
        {"prompt": "q", "completions": ["ab", "cd\n"], "labels": [None, 1]},
        {"prompt": [{"role": "user", "content": "hi"}], "completions": ["a", "b"], "labels": [1, 0]},
    ]
    assert steps(write(tmp_path, *rows)) == [
        Steps(ids("q"), ids("ab\ncd\ne") + EOS, [2, 5, 7], [1.0, 0.25, 0.0]), Steps(ids("q"), ids("ab\ncd\n") + EOS, [5], [1.0]),
        Steps(ids("<user>hi\3\n<assistant>"), ids("a\nb") + EOS, [1, 3], [1.0, 0.0]),
    ]  # fmt: skip
    config = write(tmp_path, {"prompt": "q", "completions": ["ab", "cd", "ef"], "labels": [1, 0, 0]})
    assert steps(config, 8, "truncate") == [Steps(ids("q"), ids("ab\ncd\ne"), [2, 5], [1.0, 0.0])]
    with pytest.raises(DataError, match="no step with a label ends within max_tokens=3"):
        steps(config, 3, "truncate")
    with pytest.raises(DataError, match="have 10 tokens, more than max_tokens=9"):
        steps(config, 9)
    rows = [{"prompt": "q", "completions": ["a\nb"], "labels": [1]}, {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0]}]
    config, quarantine = DataConfig(path=write_rows(tmp_path, *rows), bad_rows="quarantine"), Quarantine()
    assert steps(config, quarantine=quarantine) == [Steps(ids("q"), ids("a\nb") + EOS, [1, 3], [1.0, 0.0])]
    (entry,) = quarantine.entries
    assert entry["line"] == 1 and "2 steps by the separator '\\n', but the row has 1" in entry["reason"]
    assert quarantine.first == {"prompt": "q", "completion": TOKENIZER.decode(ids("a\nb") + EOS)}


LOADERS = {"dpo": RowLoader.unequal_pairs, "kto": RowLoader.marked}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
WANTED = {"prompt": "1+1=", "completion": "2", "label": True}
UNWANTED = {"prompt": "2+1=", "completion": "4", "label": False}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    train_sentencepiece([f"{n}+{n + 1}={2 * n + 1} wanted" for n in range(80)], path, 290)
    return load_tokenizer(TokenizerConfig(path=path, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"))


def load(
    kind: str, rows: list[Any], folder: Path, tokenizer: Tokenizer, most: int = 60, **settings: Any
) -> tuple[list[Any], Quarantine]:
    quarantine = Quarantine()
    config = DataConfig(path=write_rows(folder, *rows), **settings)
    return list(LOADERS[kind](RowLoader(config, tokenizer, most, quarantine))), quarantine


def shown(rows: list[Marked], tokenizer: Tokenizer) -> list[tuple[str, str, list[int]]]:
    assert all(row.completion[-1] == tokenizer.eos_id for row in rows)
    return [(tokenizer.decode(row.prompt), tokenizer.decode(row.completion[:-1]), row.wanted) for row in rows]


def test_a_label_says_whether_a_completion_is_wanted_and_a_pair_is_two_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for labels in ((True, False), (1, 0), ("true", "False"), ("1", "0"), (1.0, 0.0)):
        rows = [WANTED | {"label": labels[0]}, UNWANTED | {"label": labels[1]}]
        found, quarantine = load("kto", rows, tmp_path, tokenizer)
        assert shown(found, tokenizer) == [("1+1=", "2", [1]), ("2+1=", "4", [0])]
        assert quarantine.first == {"prompt": "1+1=", "completion": "2", "label": "wanted"}
        assert "1 of 2 completions are wanted, 1 are not" in quarantine.notes
    rows = [{"prompt": "a", "completion": "b", "thumb": 1}, {"prompt": "a", "completion": "b", "thumb": 0}]
    found, quarantine = load("kto", rows, tmp_path, tokenizer, columns={"label": "thumb"})
    assert [row.wanted for row in found] == [[1], [0]]
    assert "1 completions are wanted in one row and unwanted in another" in quarantine.notes
    with pytest.raises(DataError, match=r"no column for the label .*set data.columns.label|Set data.columns.label"):
        load("kto", rows, tmp_path, tokenizer)
    asked, answers = {"role": "user", "content": "1+1="}, {name: PAIR[name] for name in ("chosen", "rejected")}
    hh = {name: f"\n\nHuman: 1+1=\n\nAssistant: {text}" for name, text in answers.items()}
    for pair in (PAIR, hh, {name: [asked, {"role": "assistant", "content": text}] for name, text in answers.items()}):
        found, _ = load("kto", [pair], tmp_path, tokenizer)
        assert [(answer.strip(), wanted) for _, answer, wanted in shown(found, tokenizer)] == [("2", [1]), ("3", [0])]
        assert found[0].prompt == found[1].prompt


SAME = PAIR | {"rejected": "2"}
BAD = {
    "dpo, the same answer twice": ("dpo", [PAIR, SAME, SAME], r"rows.jsonl:2: chosen and rejected are the same.*and 1 more"),
    "dpo, an empty answer": ("dpo", [PAIR, PAIR | {"chosen": " "}], r"rows.jsonl:2: column 'chosen' is empty"),
    "dpo, no rejected": ("dpo", [{"prompt": "a", "chosen": "b"}], r"no column for the rejected .*data.columns.rejected"),
    "dpo, one without a rejected": ("dpo", [PAIR, {"prompt": "a", "chosen": "b"}], r":2: column 'rejected' is missing"),
    "dpo, completions": ("dpo", [WANTED, UNWANTED], r"no column for the chosen"),
    "kto, the same answer twice": ("kto", [PAIR, SAME], r"rows.jsonl:2: chosen and rejected are the same"),
    "kto, an empty completion": ("kto", [WANTED, UNWANTED, WANTED | {"completion": ""}], r":3: column 'completion' is empty"),
    "kto, no label": ("kto", [{"prompt": "a", "completion": "b"}], r"no column for the label \(looked for label\)"),
    "kto, one without a label": ("kto", [WANTED, UNWANTED, {"prompt": "a", "completion": "b"}], r":3: column 'label' is missing"),
    "kto, a label between": ("kto", [WANTED, UNWANTED | {"label": 0.5}], r":2: column 'label' is 0.5, but must say if"),
    "kto, a label of words": ("kto", [WANTED, UNWANTED | {"label": "good"}], r"'good', but must say if"),
    "kto, all wanted": ("kto", [WANTED, WANTED], r"all 2 rows are wanted: KTO learns from both"),
    "kto, none wanted": ("kto", [UNWANTED], r"all 1 rows are unwanted"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    kind, rows, words = BAD[case]
    with pytest.raises(DataError, match=words):
        load(kind, rows, tmp_path, tokenizer)


def test_what_is_refused_too_long_or_cut_to_the_same_tokens_can_be_set_aside(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for kind, num in (("dpo", 1), ("kto", 2)):
        found, quarantine = load(kind, [SAME, PAIR], tmp_path, tokenizer, bad_rows="quarantine")
        assert len(found) == num and [entry["line"] for entry in quarantine.entries] == [1]
        assert quarantine.entries[0]["reason"] == "chosen and rejected are the same: such a pair prefers nothing"
    rows = [PAIR, PAIR | {"rejected": "2 wanted " * 9}]
    found, quarantine = load("kto", rows, tmp_path, tokenizer, most=20, long_rows="quarantine")
    assert [row.wanted for row in found] == [[1], [0], [1]] and len(quarantine.entries) == 1, "a row of a pair alone"
    answer = "2 wanted 2 wanted 2 wanted"
    rows = [PAIR, PAIR | {"chosen": f"{answer} 7", "rejected": f"{answer} 8"}]
    assert len(load("dpo", rows, tmp_path, tokenizer, long_rows="truncate")[0]) == 2
    with pytest.raises(DataError, match="the same once they are cut to max_tokens=12"):
        load("dpo", rows, tmp_path, tokenizer, most=12, long_rows="truncate")


LINE = re.compile(r"(\d+)([+-]\d+)=(\d+)")


def check_work(solution: str) -> list[bool]:
    lines = [LINE.fullmatch(line) for line in solution.split("\n")[:-1]]
    assert all(lines)
    return [int(line[1]) + int(line[2]) == int(line[3]) for line in lines if line]


@pytest.fixture(scope="module")
def five_thousand() -> list[Problem]:
    return list(islice(problems(1, "train"), 5000))


def test_solutions_are_right_and_small(five_thousand: list[Problem]) -> None:
    assert Problem((7, 5, -3)).prompt == "Q: 7+5-3=?\nA:" and Problem((7, 5, -3)).solution == "7+5=12\n12-3=9\n#### 9"
    for problem in five_thousand:
        chain = problem.prompt.removeprefix("Q: ").removesuffix("=?\nA:")
        assert re.fullmatch(r"\d+([+-]\d)+", chain)
        value = eval(chain)
        assert all(check_work(problem.solution)) and problem.solution.endswith(f"\n#### {value}")
        assert verify("arithmetic", problem.solution, str(value)) == 1.0
        assert all(0 <= total <= 99 for total in problem.totals)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lengths_are_long_tailed(seed: int) -> None:
    sample = list(islice(problems(seed, "train"), 5000))
    lengths = sorted(len(problem.solution) for problem in sample)
    assert lengths[4950] >= 5 * lengths[2500]
    short = sum(problem.num_operations <= 3 for problem in sample)
    assert short > 0.7 * len(sample) and max(problem.num_operations for problem in sample) == 24


def test_wrong_solutions_are_alike_a_slip_is_followed_through_and_a_misreport_is_right_work(five_thousand: list[Problem]) -> None:
    rng = random.Random(0)
    wrong = [generated.wrong_solution(problem, rng) for problem in five_thousand]
    assert all(verify("arithmetic", text, problem.answer) == 0.0 for text, problem in zip(wrong, five_thousand, strict=True))
    assert 0.85 < sum(map(len, wrong)) / sum(len(problem.solution) for problem in five_thousand) < 1.05
    num_lines = [text.count("\n") - problem.num_operations for text, problem in zip(wrong, five_thousand, strict=True)]
    assert set(num_lines) > {0, -1} and min(num_lines) < -3, "slips and copies, skipped steps, early stops"
    assert any(all(check_work(text)) for text in wrong), "right work, wrong last line or missing steps"
    rng = random.Random(0)
    for problem in [*five_thousand[:1000], Problem((99, -9, 9)), Problem((1, -1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9))]:
        slipped = generated.slipped_solution(problem, rng)
        assert check_work(slipped).count(False) == 1
        lines = slipped.split("\n")
        results = [re.split(r"[+\-=]", line) for line in lines[:-1]]
        assert all(before[-1] == after[0] for before, after in zip(results, results[1:], strict=False))
        assert lines[-1] == f"#### {results[-1][-1]}" and 0 <= int(results[-1][-1]) <= 99
    assert generated.misreported_solution(Problem((7, 5, -3)), random.Random(0)) == "7+5=12\n12-3=9\n#### 12"
    for problem in five_thousand[:1000]:
        text = generated.misreported_solution(problem, random.Random(0))
        assert text.split("\n")[:-1] == problem.solution.split("\n")[:-1]
        assert verify("arithmetic", text, problem.answer) == 0.0


def test_splits_never_meet_repeat_by_seed_and_obey_their_shape() -> None:
    train = {problem.prompt for seed in (1, 2) for problem in islice(problems(seed, "train"), 3000)}
    heldout = {problem.prompt for seed in (1, 2) for problem in islice(problems(seed, "heldout"), 300)}
    assert not train & heldout and all(map(generated.is_heldout, heldout)) and not any(map(generated.is_heldout, train))
    assert list(islice(problems(5, "train"), 50)) == list(islice(problems(5, "train"), 50))
    assert list(islice(problems(5, "train"), 50)) != list(islice(problems(6, "train"), 50))
    sample = list(islice(problems(1, "train", Shape(max_operations=2, scale=1.0, tail=1.0, max_operand=3, largest=7)), 500))
    assert {problem.num_operations for problem in sample} == {1, 2}
    assert max(abs(term) for problem in sample for term in problem.terms[1:]) == 3
    assert max(total for problem in sample for total in problem.totals) == 7


def test_written_files(tmp_path: Path) -> None:
    sizes = generated.DatasetSizes(sft=1000, pairs=300, prompts=200, heldout=100)
    paths = generated.write_dataset(tmp_path / "one", 7, sizes, imperfect=0.25)
    again = generated.write_dataset(tmp_path / "two", 7, sizes, imperfect=0.25)
    rows = {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in paths.items()}
    assert {name: len(values) for name, values in rows.items()} == {"sft": 1000, "pairs": 300, "prompts": 200, "heldout": 100}
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(f"{name}.jsonl" for name in paths)
    assert all(paths[name].read_bytes() == again[name].read_bytes() for name in paths)

    def right(prompt: str, solution: str) -> bool:
        return verify("arithmetic", solution, eval(prompt.removeprefix("Q: ").removesuffix("=?\nA:"))) == 1.0

    assert 200 < sum(not right(row["prompt"], row["completion"]) for row in rows["sft"]) < 300
    assert all(right(row["prompt"], row["chosen"]) and not right(row["prompt"], row["rejected"]) for row in rows["pairs"])
    assert all(right(row["prompt"], f"#### {row['answer']}") for row in rows["prompts"] + rows["heldout"])
    heldout = {row["prompt"] for row in rows["heldout"]}
    assert len(heldout) == 100
    assert not heldout & {row["prompt"] for name in ("sft", "pairs", "prompts") for row in rows[name]}
