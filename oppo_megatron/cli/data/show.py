"""`oppo data show`: rows token by token with the loss mask, lengths by file, and the micro-batches of an epoch."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle
from operator import mul
from typing import Any, NamedTuple

from oppo_megatron.cli.lengths import even_lengths
from oppo_megatron.cli.load import guess_kind, load_settings
from oppo_megatron.cli.parser import add_config_arguments, at_least, count
from oppo_megatron.clock import by_time
from oppo_megatron.config.derived import members
from oppo_megatron.config.describe import COMMANDS
from oppo_megatron.config.model import PlacementConfig
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.data.prompts import Origin, PromptSet, PromptStream, RowOrder
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Marked, Steps, batches, load_rows, read_heldout
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import training_placements
from oppo_megatron.report.comparison import format_table
from oppo_megatron.schedule.packing import Packing, balance, pack_by_tokens, packing_figures
from oppo_megatron.train.inputs import describe_quarantine, read_inputs, try_answers

HELP = "print rows token by token with the loss mask, and lengths by file"
COLUMNS = ("split", "file", "rows", "weight", "set aside", "cut", "median", "p90", "max", "share")


class ModelInput(NamedTuple):
    """Tokens that a model reads together; `marks`: positions that the loss counts, and as what."""

    name: str
    tokens: Sequence[int]
    num_prompt: int
    marks: Mapping[int, str]


class Reading(NamedTuple):
    """Rows by split; tokens and inputs of a row; tokens of the rows of each optimizer step of an epoch."""

    tokenizer: Tokenizer
    quarantine: Quarantine
    splits: Mapping[str, tuple[Sequence[Any], Sequence[Origin]]]
    num_tokens: Callable[[Any], int]
    inputs: Callable[[Any], list[ModelInput]]
    steps: Iterable[Sequence[int]]
    replicas: int
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--kind", choices=[kind for kind in COMMANDS if kind != "serve"], help="default: by the file's keys")
    parser.add_argument("--split", choices=("train", "heldout"), default="train", help="rows to print (default: train)")
    parser.add_argument("--row", type=at_least(0), default=0, metavar="N", help="first row to print (default: 0)")
    parser.add_argument("--number", type=count, default=1, metavar="N", help="number of rows to print (default: 1)")


def run(args: argparse.Namespace) -> int:
    kind = args.kind or guess_kind(args.config, args.overrides)
    if kind == "serve":
        raise ConfigError(f"{args.config} is a configuration for `oppo serve`, which reads no rows; name one of a run")
    settings = load_settings(kind, args.config, args.overrides)
    reading = _prompts(settings) if isinstance(settings, TrainSettings) else _answers(settings)
    rows, origins = reading.splits[args.split]
    if args.row >= len(rows):
        raise ConfigError(f"--row is {args.row}, but the split {args.split} has {len(rows)} usable rows, numbered from 0")
    for number in range(args.row, min(args.row + args.number, len(rows))):
        print(f"{args.split} row {number}, {origins[number].place}{', cut' * origins[number].is_cut}")
        print(*chain.from_iterable(_lines(each, reading.tokenizer) for each in reading.inputs(rows[number])), "", sep="\n")
    print(*describe_quarantine(reading.quarantine), format_table({name: name for name in COLUMNS}, by_file(reading)), sep="\n")
    print(describe_steps(reading, settings.runtime.micro_batch_tokens))
    return 0


def _prompts(settings: TrainSettings) -> Reading:
    """Read prompts; steps are in the data's order, with the planner's lengths of responses."""
    inputs = try_answers(read_inputs(settings, by_time()), settings)
    config = settings.resolved() or settings.with_placement(PlacementConfig(mode="single"))
    sets = {"train": inputs.prompts, "heldout": inputs.heldout or PromptSet([])}
    splits = {name: (prompts.rows, prompts.origins) for name, prompts in sets.items()}
    stream = PromptStream(inputs.prompts, config.seed, epochs=1, shuffle=config.data.shuffle)
    trained = [prompt for prompt in stream if not members(config).is_greedy(prompt.seq_id)]
    responses, parts = even_lengths(config), config.ppo.minibatches
    lengths = [len(prompt.tokens) + more - 1 for prompt, more in zip(trained, cycle(responses), strict=False)]
    batches = (lengths[first : first + len(responses)] for first in range(0, len(lengths), len(responses)))
    steps = filter(None, (batch[part::parts] for batch in batches for part in range(parts)))
    longest = f"{max(responses)} tokens, the most" if config.rollout.lengths is None else "forced lengths"
    return Reading(
        inputs.tokenizer, inputs.quarantine, splits, lambda row: len(row.tokens),
        lambda row: [ModelInput("prompt", row.tokens, len(row.tokens), {})], steps, training_placements(config)["actor"].dp,
        f"; with responses of {longest}",
    )  # fmt: skip


def _answers(settings: SupervisedConfig) -> Reading:
    from oppo_megatron.train.supervised import task_of

    quarantine, task = Quarantine(progress=by_time()), task_of(settings)
    tokenizer = load_tokenizer(settings.tokenizer, settings.model.checkpoint)
    read = partial(load_rows, settings, tokenizer=tokenizer, quarantine=quarantine)
    rows, held = read_heldout(settings.evaluation, settings.seed, read(settings.data), read)
    order = RowOrder(rows.sources, settings.seed, settings.data.shuffle)
    steps = ([task.num_tokens(rows[i]) for i in index] for index in batches(order, settings.batch_size, 1, None))
    splits = {"train": (rows, rows.origins), "heldout": (held, held.origins)}
    return Reading(tokenizer, quarantine, splits, task.num_tokens, partial(answer_inputs, task), steps, settings.parallel.dp)


def answer_inputs(task: Any, row: Any) -> list[ModelInput]:
    """Inputs of a supervised row, from the micro-batch that its `Task` makes of it."""
    import torch

    from oppo_megatron.train.reference_pass import key_of
    from oppo_megatron.train.supervised_tasks import Preferences

    if isinstance(task, Preferences):  # the reference's log-probs are an input of the loss, not of the model
        task.reference = {key_of(*answer): 0.0 for answer in task.answers(row)}
    (batch,) = task.micro_batches([row], task.num_tokens(row), torch.device("cpu"))
    tokens, places, targets = batch.tokens_T.tolist(), batch.rows_R.tolist(), batch.targets_R.tolist()
    ahead, found, start = int(task.head == "lm"), list[ModelInput](), 0
    word = ("unwanted", "wanted")[row.wanted[0]] if isinstance(row, Marked) else "trained" if ahead else "scored"
    for name, length in zip(row._fields[1:], batch.lengths, strict=False):
        own = [number for number, place in enumerate(places) if start <= place < start + length]
        words = [f"label {label:g}" for label in row.labels] if isinstance(row, Steps) else [word] * len(own)
        read = [*tokens[start : start + length], *(targets[number] for number in own[-ahead:] if ahead)]
        marks = {places[number] - start + ahead: word for number, word in zip(own, words, strict=True)}
        found.append(ModelInput(name, read, len(row.prompt), marks))
        start += length
    return found


def _lines(read: ModelInput, tokenizer: Tokenizer) -> Iterator[str]:
    marks = [read.marks.get(place, "masked") for place in range(len(read.tokens))]
    counts = ", ".join(f"{number} {mark}" for mark, number in Counter(marks).items())
    yield f"  {read.name}, {len(marks)} tokens: {counts}{'' if read.marks else '; the response is trained'}"
    for place, (token, mark) in enumerate(zip(read.tokens, marks, strict=True)):
        text, part = tokenizer.decode([token]), "prompt" if place < read.num_prompt else read.name
        shown = repr(text) if text and "\ufffd" not in text else tokenizer.piece(token)
        yield f"  {place:>6} {token:>7}  {part:<10} {mark:<10} {shown}"


def by_file(reading: Reading) -> list[dict[str, Any]]:
    """Lengths of each file's rows; `share`: of the tokens that an epoch reads."""
    table = list[dict[str, Any]]()
    aside = Counter(entry["file"] for entry in reading.quarantine.entries)
    for split, (rows, origins) in reading.splits.items():
        files: dict[tuple[str, float], list[int]] = {}
        weights = [origin.source.weight if split == "train" else 1.0 for origin in origins]
        for place, origin in enumerate(origins):
            files.setdefault((origin.place.rpartition(":")[0], weights[place]), []).append(place)
        lengths = [reading.num_tokens(row) for row in rows]
        total = sum(map(mul, lengths, weights))
        for (file, weight), places in files.items():
            own, num_rows = sorted(lengths[place] for place in places), len(places)
            cells = split, file, num_rows, f"{weight:g}", aside.pop(file, 0), sum(origins[place].is_cut for place in places)
            longest = own[(num_rows - 1) // 2], own[(9 * num_rows - 1) // 10], own[-1]
            table.append(dict(zip(COLUMNS, (*cells, *longest, weight * sum(own) / total), strict=True)))
    return [*table, *({"file": file, "rows": 0, "set aside": number} for file, number in aside.items())]


def describe_steps(reading: Reading, budget: int) -> str:
    shares = [[[step[i] for i in share] for share in balance(step, reading.replicas)] for step in reading.steps]
    tokens, packings = [sum(map(sum, each)) for each in shares], [Packing.of(each, budget) for each in shares]
    counts = [max(len(pack_by_tokens(share, budget)) for share in each) for each in shares]
    return (
        f"an epoch: {len(tokens)} optimizer steps of {min(tokens)} to {max(tokens)} tokens, {sum(tokens)} in all, no padding\n"
        f"a step: {min(counts)} to {max(counts)} micro-batches per replica, of at most {budget} tokens "
        f"(runtime.micro_batch_tokens); {', '.join(f'{name} {value:.2f}' for name, value in packing_figures(packings).items())}"
        f"{reading.note}"
    )
