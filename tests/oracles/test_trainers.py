"""Final weights of optimizer steps of our commands and of TRL's trainers, from the same float32 weights and rows; and the losses
of `oppo dpo` against TRL's: fifty random batches a case, loss and gradient of the logits."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl, in an environment of its own: make test-oracles", allow_module_level=True)

import torch
from torch import Tensor

from examples.arithmetic.write_steps import write_steps
from oppo_megatron.algorithms.supervised_losses import mean_loss
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.supervised import DPOConfig
from oppo_megatron.data.generated import DatasetSizes, Shape, write_dataset
from oppo_megatron.data.supervised_rows import Marked, Pair
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.mcore.vocab import OutputRows, VocabShards
from oppo_megatron.train.reference_pass import key_of, missing_answers
from oppo_megatron.train.supervised_tasks import MarkedPreferences, PairPreferences, Preferences, answer_logprobs
from tests.e2e.supervised import run, settings
from tests.oracles import trl_oracle as trl
from tests.oracles.comparing import BATCHES, TOLERANCE
from tests.oracles.trl_oracle import Answered
from tests.oracles.trl_trainers import Trained, arguments, train_groups, train_online_pairs, train_preferences, train_steps
from tests.support.hf import save_tiny, tensors_of
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks
from tests.support.tokenizers import save_byte_level

STEPS, BATCH, GROUP, LONGEST = 3, 8, 4, 24
PAD = 1
"""With which a response may end, too, where TRL asks whether it was cut."""
CLOSE, MOVED = 1e-5, 1e-3
OPTIMIZER = {"lr": 2e-3, "decay": "cosine", "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.1}
"""Adam's divisor is well above rounding.  Each case has a bound of the gradient that some of its steps reach and some do not:
where all are clipped, or none, Adam makes the same weights of a loss that is too large by a factor."""
MODEL, REFERENCE, SCALAR = "model", "reference", "scalar"
ACTOR = Path("runs", "run", "weights", "actor")
BETA, VOCAB = 0.3, 11
Row = dict[str, Any]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    sizes = DatasetSizes(sft=1, pairs=STEPS * BATCH, prompts=32, heldout=1)
    files = write_dataset(root, seed=7, sizes=sizes, shape=Shape(max_operations=4))
    write_steps(root / "steps.jsonl", seed=7, count=STEPS * BATCH, shape=Shape(max_operations=4))
    pairs = lines(files["pairs"])
    with (root / "marked.jsonl").open("w") as file:
        for number, pair in enumerate(pairs):
            wanted = number % 3 > 0
            row = {"prompt": pair["prompt"], "completion": pair["chosen" if wanted else "rejected"], "label": wanted}
            file.write(json.dumps(row) + "\n")
    save_byte_level(root / "tokenizer", [pair["prompt"] + pair["chosen"] for pair in pairs])
    for name, seed in ((MODEL, 0), (REFERENCE, 5)):
        save_tiny(root / name, "qwen2", vocab_size=320, seed=seed)
    save_tiny(root / SCALAR, "qwen2", "scalar", vocab_size=320)
    return root


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def supervised(kind: str, inputs: Path, run_dir: Path, rows: str, clip: float, model: str = MODEL, **changes: Any) -> list[Row]:
    usual = {
        "batch_size": BATCH, "steps": STEPS, "tokenizer": {"path": inputs / "tokenizer"},
        "data": {"path": inputs / rows, "shuffle": False, **changes.pop("data", {})}, "model": {"checkpoint": inputs / model},
        "optimizer": OPTIMIZER | {"clip_grad": clip},
    }  # fmt: skip
    return run(kind, settings(inputs, kind, run_dir, **usual | changes))


def require_same_weights(ours: Path, theirs: Trained, begin: Path) -> None:
    trained, start = tensors_of(ours), tensors_of(begin)
    assert trained.keys() == theirs.weights.keys() == start.keys()
    for name, weight in theirs.weights.items():
        assert (weight - start[name]).abs().max() > MOVED, f"{name} did not move: nothing is tested"
        assert (trained[name] - weight).abs().max() < CLOSE, name


def require_same_steps(metrics: list[Row], theirs: Trained, clip: float) -> None:
    assert [line["loss"] for line in metrics] == pytest.approx(theirs.losses, rel=1e-4)
    require_same_norms(metrics, theirs, clip)


def require_same_norms(metrics: list[Row], theirs: Trained, clip: float, passes: int = 1) -> None:
    """Ours are means over the passes of a step."""
    norms = [sum(theirs.norms[i : i + passes]) / passes for i in range(0, len(theirs.norms), passes)]
    assert [line["grad_norm"] for line in metrics] == pytest.approx(norms, rel=1e-4)
    assert min(theirs.norms) < clip < max(theirs.norms), "some steps should be clipped, and some not"


def require_same_tokens(inputs: Path, rows: list[Row], columns: dict[str, str], theirs: Trained) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(path=inputs / "tokenizer"))
    for row, found in zip(rows, theirs.data, strict=True):
        assert found["prompt_ids"] == tokenizer.encode(row["prompt"])
        for theirs_name, name in columns.items():
            assert found[theirs_name] == [*tokenizer.encode(row[name]), tokenizer.eos_id]


MARKED = {"wanted": 1.0, "unwanted": 1.5}, {"desirable_weight": 1.0, "undesirable_weight": 1.5}
PREFERENCES: dict[str, tuple[str, Row, Row, float]] = {
    "sigmoid": ("dpo", {}, {"loss_type": ["sigmoid"]}, 15.0),
    "robust": ("dpo", {"loss": "robust", "label_smoothing": 0.2}, {"loss_type": ["robust"], "label_smoothing": 0.2}, 25.0),
    "ipo, which TRL averages": ("dpo", {"loss": "ipo", "average": True}, {"loss_type": ["ipo"]}, 20.0),
    "kto": ("kto", {"loss": "kto", **MARKED[0]}, {"loss_type": "kto", **MARKED[1]}, 5.0),
    "apo": ("kto", {"loss": "apo_zero_unpaired", **MARKED[0]}, {"loss_type": "apo_zero_unpaired", **MARKED[1]}, 3.0),
}
"""Our kind of data and `dpo`, TRL's settings, and the bound of the gradient."""
COLUMNS = {"dpo": {"chosen_ids": "chosen", "rejected_ids": "rejected"}, "kto": {"completion_ids": "completion"}}


@pytest.mark.parametrize("case", PREFERENCES)
def test_preferences(inputs: Path, tmp_path: Path, case: str) -> None:
    """KTO's prompts all differ, and a batch is one micro-batch of TRL's, so mismatched rows are the same."""
    kind, rule, their_rule, clip = PREFERENCES[case]
    file, reference = "pairs.jsonl" if kind == "dpo" else "marked.jsonl", {"checkpoint": inputs / REFERENCE}
    metrics = supervised(kind, inputs, tmp_path / "run", file, clip, reference=reference, dpo={"beta": BETA, **rule})
    rows = lines(inputs / file)
    assert kind == "dpo" or len({row["prompt"] for row in rows}) == len(rows)
    common = arguments(tmp_path / "trl", OPTIMIZER | {"clip_grad": clip}, STEPS, BATCH)
    theirs = train_preferences(common, rows, inputs / MODEL, inputs / REFERENCE, inputs / "tokenizer", beta=BETA, **their_rule)
    require_same_tokens(inputs, rows, COLUMNS[kind], theirs)
    require_same_steps(metrics, theirs, clip)
    require_same_weights(tmp_path / "run" / "weights", theirs, inputs / MODEL)
    if case == "kto":
        assert min(line["reference_point"] for line in metrics) > 0, "z0 is cut off at 0: it is not tested"


def test_prm(inputs: Path, tmp_path: Path) -> None:
    """TRL writes a separator behind the last step, too; what we have beyond that is EOS, behind all labels."""
    clip = 9.0
    metrics = supervised(
        "prm", inputs, tmp_path / "run", "steps.jsonl", clip, SCALAR, data={"completion_template": "{completion}\n"}
    )
    rows = lines(inputs / "steps.jsonl")
    common = arguments(tmp_path / "trl", OPTIMIZER | {"clip_grad": clip}, STEPS, BATCH)
    theirs = train_steps(common, rows, inputs / SCALAR, inputs / "tokenizer", separator="\n")
    tokenizer = load_tokenizer(TokenizerConfig(path=inputs / "tokenizer"))
    for row, found in zip(rows, theirs.data, strict=True):
        answer = "".join(f"{step}\n" for step in row["completions"])
        assert found["input_ids"] == [*tokenizer.encode(row["prompt"]), *tokenizer.encode(answer)]
    require_same_steps(metrics, theirs, clip)
    require_same_weights(tmp_path / "run" / "weights", theirs, inputs / SCALAR)


TWICE = {"ppo.epochs": 2}
SMALL = {"rewards": [{"kind": "model", "weight": 0.05}]}
"""Where scores are not scaled, and log-probs not averaged."""
GROUPED: dict[str, tuple[Row, Row, float]] = {
    "grpo": ({"ppo.kl": {"coefficient": 0.2}}, {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": False}, 8.0),
    "grpo without KL": ({"ppo.kl": {"mode": "none"}}, {"loss_type": "grpo"}, 8.0),
    "dr_grpo": ({}, {"loss_type": "dr_grpo", "scale_rewards": "none"}, 3.0),
    "dapo": ({}, {"loss_type": "dapo", "epsilon_high": 0.28}, 7.0),
    "rloo": (SMALL | {"ppo.kl": {"coefficient": 0.01}}, {"beta": 0.01}, 5.0),
    "grpo, twice": (TWICE | {"ppo.kl": {"coefficient": 0.2}}, {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": False},
        8.0),
    "grpo, twice, reverse KL": (TWICE | {"ppo.kl": {"coefficient": 0.2, "estimator": "k3+"}}, {"loss_type": "grpo", "beta": 0.2},
        8.0),
    "dapo, cut ones masked": ({"ppo.truncated": "mask", "rollout.max_response_tokens": 60, "rollout.stop": [PAD]},
        {"loss_type": "dapo", "epsilon_high": 0.28, "max_completion_length": 60, "mask_truncated_completions": True}, 5.0),
    "dapo, twice": (TWICE, {"loss_type": "dapo", "epsilon_high": 0.28}, 5.0),
    "gspo, twice": (TWICE | {"ppo.clip": 0.4, "ppo.clip_high": 0.8},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.4, "epsilon_high": 0.8}, 5.0),
    "cispo, twice": (TWICE | {"ppo.clip_high": 0.1}, {"loss_type": "cispo", "scale_rewards": "batch", "epsilon_high": 1.1}, 5.0),
    "rloo, twice": (TWICE | SMALL | {"ppo.kl": {"coefficient": 0.01}, "ppo.clip": 0.9, "ppo.clip_high": 9.0},
        {"beta": 0.01, "epsilon": 0.9, "epsilon_high": 9.0}, 5.0),
}  # fmt: skip
"""Settings of ours beside the preset that a name begins with, what TRL calls them, and the bound of the gradient."""


def rolled_out(inputs: Path, root: Path, preset: str, size: int, clip: float, **changes: Any) -> tuple[Outcome, list[list[Row]]]:
    config = Workspace(root).config(
        "run", tokenizer={"path": str(inputs / "tokenizer")},
        data={"path": str(inputs / "prompts.jsonl"), "max_prompt_tokens": 48}, algorithm={"preset": preset},
        actor={"checkpoint": str(inputs / MODEL), "optimizer": OPTIMIZER | {"clip_grad": clip}}, critic=None,
        reward={"checkpoint": str(inputs / SCALAR)},
        rollout={"batch_size": BATCH, "group_size": size, "max_response_tokens": LONGEST, "stop": list(range(40))},
        ppo={"minibatches": 1}, steps=STEPS, **{"ppo.epochs": 1} | changes,
    )  # fmt: skip
    outcome = run_ppo_ranks(config)
    assert len({len(row["tokens"]) for row in outcome.rollouts}) > 5, "responses should differ in length"
    return outcome, [[row for row in outcome.rollouts if row["step"] == step + 1] for step in range(STEPS)]


@pytest.mark.parametrize("case", GROUPED)
def test_groups(inputs: Path, tmp_path: Path, case: str) -> None:
    changes, rule, clip = GROUPED[case]
    passes = changes.get("ppo.epochs", 1)
    reference = {"reference": {"checkpoint": str(inputs / REFERENCE)}} if rule.get("beta") else {}
    preset = case.split()[0].strip(",")
    outcome, batches = rolled_out(inputs, tmp_path, preset, GROUP, clip, **reference, **changes)
    common = arguments(tmp_path / "trl", OPTIMIZER | {"clip_grad": clip}, STEPS * passes, BATCH)
    theirs = train_groups(
        common, batches, GROUP, inputs / MODEL, inputs / REFERENCE, inputs / "tokenizer",
        num_iterations=passes, **{"max_completion_length": LONGEST} | rule,
    )  # fmt: skip
    require_same_norms(outcome.metrics, theirs, clip, passes)
    require_same_weights(tmp_path / ACTOR, theirs, inputs / MODEL)
    if "ppo.truncated" in changes:
        cut = [row["finish_reason"] == "length" for row in outcome.rollouts]
        assert 4 < sum(cut) < len(cut) - 4, "some responses should be cut, and some not"
    if passes > 1:
        assert min(theirs.norms) > 0, "nothing is left of a second pass"
        assert max(line["clip_fraction"] for line in outcome.metrics) > 0, "no ratio is held: its bounds are not tested"


def test_online_dpo(inputs: Path, tmp_path: Path) -> None:
    clip = 18.0
    outcome, batches = rolled_out(
        inputs, tmp_path, "online_dpo", 2, clip, dpo={"beta": BETA}, reference={"checkpoint": str(inputs / REFERENCE)},
    )  # fmt: skip
    scores = [row["reward"] for row in outcome.rollouts]
    assert all(first != second for first, second in zip(scores[::2], scores[1::2], strict=True)), "no pair is a tie"
    common = arguments(tmp_path / "trl", OPTIMIZER | {"clip_grad": clip}, STEPS, BATCH // 2)
    theirs = train_online_pairs(
        common, batches, inputs / MODEL, inputs / REFERENCE, inputs / "tokenizer",
        loss_type="sigmoid", beta=[BETA], max_new_tokens=LONGEST,
    )  # fmt: skip
    require_same_norms(outcome.metrics, theirs, clip)
    require_same_weights(tmp_path / ACTOR, theirs, inputs / MODEL)


LOSSES: dict[str, tuple[dict[str, Any], list[str], list[float]]] = {
    "sigmoid": ({}, ["sigmoid"], [1.0]), "robust": ({"loss": "robust", "label_smoothing": 0.2}, ["robust"], [1.0]),
    "hinge": ({"loss": "hinge"}, ["hinge"], [1.0]), "ipo, which TRL averages": ({"loss": "ipo", "average": True}, ["ipo"], [1.0]),
    "sigmoid_norm": ({"average": True}, ["sigmoid_norm"], [1.0]),
    "sigmoid and sft": ({"nll": 0.3}, ["sigmoid", "sft"], [1.0, 0.3]),
}  # fmt: skip


def answer(rng: random.Random, length: int | None = None) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length or rng.randint(1, 7))]


def logits_of(answered: Sequence[Answered], generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(len(tokens), VOCAB, generator=generator).requires_grad_() for _, tokens in answered]


def our_loss(task: Preferences[Any], rows: list[Any], answered: Sequence[Answered], logits: Sequence[Tensor]) -> Tensor:
    shares = []
    places = {id(tokens): logits_RV for (_, tokens), logits_RV in zip(answered, logits, strict=True)}
    for batch in task.micro_batches(rows, 30, torch.device("cpu")):
        inside = [each for i in batch.index for each in task.answers(rows[i])]
        logits_RV = torch.cat([places[id(tokens)] for _, tokens in inside])
        logp_S = answer_logprobs(batch, OutputRows(logits_RV, torch.eye(VOCAB), VocabShards(None, VOCAB, VOCAB)))
        shares.append(mean_loss(task.columns(batch, logp_S), len(rows))[0])
    return torch.stack(shares).sum()


def require_alike(ours: Tensor, theirs: Tensor, logits: Sequence[Tensor]) -> None:
    """Compare absolutely, and relatively to a number above 1: TRL adds up in float32."""
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
    for mine, other in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=TOLERANCE)


def base() -> dict[str, Any]:
    return {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"checkpoint": "m"}, "max_tokens": 64}


def refer(task: Preferences[Any], answered: Sequence[Answered], generator: torch.Generator) -> Tensor:
    values = -2.5 * torch.rand(len(answered), generator=generator, dtype=torch.float64) * 4
    missing = missing_answers(task.reference, answered)
    found = {key: float(value) for key, value in zip(missing, values.tolist(), strict=False)}
    task.reference.update(found)
    return torch.tensor([task.reference[key_of(*each)] for each in answered], dtype=torch.float64).float()


@pytest.mark.parametrize("case", LOSSES)
def test_losses_of_pairs(case: str) -> None:
    rule, loss_types, weights = LOSSES[case]
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(BATCHES):
        beta = rng.choice([0.05, 0.1, 0.5])
        task = PairPreferences(DPOConfig.model_validate(base() | {"dpo": rule | {"beta": beta}}))
        length = rng.randint(1, 7) if "sft" in loss_types else None  # TRL's mean is over all tokens of the batch, ours over pairs
        rows = [Pair(answer(rng), answer(rng, length), answer(rng)) for _ in range(rng.randint(1, 6))]
        answered = [(row.prompt, row.chosen) for row in rows] + [(row.prompt, row.rejected) for row in rows]
        logits, reference_B = logits_of(answered, generator), refer(task, answered, generator)
        theirs = trl.dpo_loss(answered, logits, reference_B, loss_types, weights, beta, rule.get("label_smoothing", 0.0))
        require_alike(our_loss(task, rows, answered, logits), theirs, logits)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_losses_of_single_completions(loss: str) -> None:
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    points = []
    for _ in range(BATCHES):
        beta, wanted, unwanted = rng.choice([0.05, 0.1, 0.5]), 1.0, rng.choice([0.5, 1.0, 1.3])
        rule = {"loss": loss, "beta": beta, "wanted": wanted, "unwanted": unwanted}
        task = MarkedPreferences(DPOConfig.model_validate(base() | {"dpo": rule}))
        rows = [Marked(answer(rng), answer(rng), [rng.randrange(2)]) for _ in range(rng.randint(2, 8))]
        answered = [(row.prompt, row.completion) for row in rows]
        logits, reference_B = logits_of(answered, generator), refer(task, answered, generator)
        ratios_B = torch.randn(len(rows), generator=generator) + 0.3
        task.point = max(0.0, float(ratios_B.double().mean())) if loss == "kto" else 0.0
        points.append(task.point)
        marks = [bool(row.wanted[0]) for row in rows]
        theirs = trl.kto_loss(answered, logits, reference_B, marks, ratios_B, loss, beta, (wanted, unwanted))
        require_alike(our_loss(task, rows, answered, logits), theirs, logits)
    assert loss != "kto" or (0.0 in points and max(points) > 0.3), "both sides of the cut at 0"
