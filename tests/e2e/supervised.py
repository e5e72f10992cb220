"""Runs of oppo sft, rm (of pairs and of steps) and dpo (by DPO and KTO) on tiny files, and their losses by transformers."""

import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from examples.arithmetic.write_steps import write_steps
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.world import World
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.describe import SUPERVISED
from oppo_megatron.config.model import LearningModelConfig
from oppo_megatron.data.generated import DatasetSizes, Shape, write_dataset
from oppo_megatron.data.tokenizer import load_tokenizer, train_sentencepiece
from oppo_megatron.train.entry import run_training
from oppo_megatron.train.reference_pass import reference_fingerprint
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.supervised import task_of, train_supervised
from tests.support.configs import run_of
from tests.support.hf import SIZES, save_tiny, tensors_of

M_MMAP_THRESHOLD = -3
"""The option of malloc.h."""
COMMANDS = {"prm": "rm", "kto": "dpo"}
"""The commands of kinds that a setting selects."""


def train(kind: str, settings: dict[str, Any], stop_after: int | None = None) -> None:
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    preemption = Preemption() if stop_after is None else StopAfter(stop_after)
    config = run_of(settings, SUPERVISED[COMMANDS.get(kind, kind)])
    train_supervised(config, task_of(config), world, preemption)


def train_with_few_holes(kind: str, settings: dict[str, Any]) -> None:
    """Blocks of 1 MiB or more go back to the system at once, so that the peak is not the allocator's."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20) == 1
    train(kind, settings)


def fingerprints(models: list[dict[str, Any]]) -> list[str]:
    return [reference_fingerprint(LearningModelConfig.model_validate(model)) for model in models]


class StopAfter(Preemption):
    def __init__(self, step: int):
        super().__init__()
        self.left = step

    def agreed_with(self, mine: bool, activity: Activity | None = None) -> tuple[bool, bool]:
        self.left -= 1
        if not self.left and dist.get_rank() == dist.get_world_size() - 1:
            self.ask()
        return super().agreed_with(mine, activity)


VOCAB = 320
NUM_ROWS = 24
SHAPE = {"model_type": "qwen2", **SIZES, "vocab_size": VOCAB, "tie_word_embeddings": True}
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5, "eps": 1e-4}
COLUMNS = {"sft": ["completion"], "rm": ["chosen", "rejected"]}
FILES = {"sft": "sft.jsonl", "rm": "pairs.jsonl", "prm": "steps.jsonl"}
Settings = dict[str, Any]
SELECTED = {"prm": {"separator": "\n"}, "kto": {"dpo": {"loss": "kto"}}}
"""Settings that select a kind."""


def write_inputs(root: Path) -> Path:
    sizes = DatasetSizes(sft=NUM_ROWS, pairs=NUM_ROWS, prompts=1, heldout=1)
    paths = write_dataset(root, seed=7, sizes=sizes, shape=Shape(max_operations=4))
    write_steps(root / FILES["prm"], seed=7, count=NUM_ROWS, shape=Shape(max_operations=4))
    rows = [json.loads(line) for line in paths["sft"].read_text().splitlines()]
    train_sentencepiece([row["prompt"] + row["completion"] for row in rows], root / "tokenizer.model", 280)
    save_tiny(root / "qwen2", "qwen2", vocab_size=VOCAB, tie_word_embeddings=True)
    save_tiny(root / "classifier", "qwen2", "scalar", vocab_size=VOCAB)
    return root


def settings(inputs: Path, kind: str, run_dir: Path, **changes: Any) -> Settings:
    return {
        "run_dir": run_dir, "batch_size": NUM_ROWS, "max_tokens": 120, "tokenizer": {"path": inputs / "tokenizer.model"},
        "data": {"path": inputs / FILES.get(kind, FILES["rm"]), "shuffle": False},
        "model": {"checkpoint": inputs / ("qwen2" if kind == "sft" else "classifier")}, "optimizer": OPTIMIZER,
        "runtime": {"device": "cpu", "micro_batch_tokens": 300}, "logging": {"console": "off"}, **SELECTED.get(kind, {}),
        **changes,
    }  # fmt: skip


def run(kind: str, chosen: Settings) -> list[dict[str, Any]]:
    command = COMMANDS.get(kind, kind)
    run_training(command, run_of(chosen, SUPERVISED[command]))
    return metrics(chosen["run_dir"])


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def token_rows(inputs: Path, kind: str) -> list[tuple[list[int], list[list[int]]]]:
    """(prompt, answers) of every row, each answer ended by EOS, as transformers would be given them."""
    tokenizer = load_tokenizer(TokenizerConfig(path=inputs / "tokenizer.model"))
    rows = [json.loads(line) for line in (inputs / FILES[kind]).read_text().splitlines()]
    answers = [["\n".join(row["completions"])] if kind == "prm" else [row[name] for name in COLUMNS[kind]] for row in rows]
    ended = [[[*tokenizer.encode(answer), tokenizer.eos_id] for answer in own] for own in answers]
    return [(tokenizer.encode(row["prompt"]), own) for row, own in zip(rows, ended, strict=True)]


def judged_steps(inputs: Path, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of all steps: a step ends with its newline, the last with EOS."""
    tokenizer = load_tokenizer(TokenizerConfig(path=inputs / "tokenizer.model"))
    (newline,) = tokenizer.encode("\n")
    logits = []
    labels = [json.loads(line)["labels"] for line in (inputs / FILES["prm"]).read_text().splitlines()]
    for prompt, (answer,) in token_rows(inputs, "prm"):
        ends = [len(prompt) + place for place, token in enumerate(answer) if token in (newline, tokenizer.eos_id)]
        hidden = model.model(torch.tensor([[*prompt, *answer]])).last_hidden_state
        logits.append(model.score(hidden)[0, ends, 0])  # the head at these tokens, not only at the last one
    return torch.cat(logits), torch.tensor([label for row in labels for label in row]).float()


def whole_loss(model: Any, kind: str, inputs: Path) -> torch.Tensor:
    if kind == "prm":
        return binary_cross_entropy_with_logits(*judged_steps(inputs, model))
    return reference_loss(model, kind, token_rows(inputs, kind))


def reference_loss(model: Any, kind: str, rows: list[tuple[list[int], list[list[int]]]]) -> torch.Tensor:
    """The loss of all rows, one unpacked sequence at a time."""
    losses = []
    for prompt, answers in rows:
        outputs = [model(torch.tensor([[*prompt, *answer]])).logits for answer in answers]
        if kind == "sft":
            logits = outputs[0][0, len(prompt) - 1 : -1]
            losses.append(cross_entropy(logits, torch.tensor(answers[0]), reduction="none"))
        else:
            losses.append(-logsigmoid(outputs[0][0] - outputs[1][0]))
    return torch.cat(losses).mean()


def hf_model(kind: str, directory: Path) -> Any:
    loader = AutoModelForCausalLM if kind == "sft" else AutoModelForSequenceClassification
    model, report = loader.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval()


def plain_steps(model: Any, losses: Sequence[Callable[[Any], torch.Tensor]], rate: Settings) -> list[tuple[float, float]]:
    """Steps of torch's AdamW, whose weight decay is of matrices alone: the loss and the gradient's norm before each."""
    learned, taken = [param for param in model.parameters() if param.requires_grad], []
    groups = [
        {"params": [p for p in learned if (p.dim() > 1) == decays], "weight_decay": rate["weight_decay"] * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate["lr"], betas=(0.9, 0.95), eps=rate["eps"])
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(learned, rate["clip_grad"])
        optimizer.step()
        taken.append((loss.item(), float(norm)))
    return taken


def require_moved(trained: Path, model: Any, start: Path, within: float) -> None:
    """Require the file to have the model's weights, changed by training."""
    model.save_pretrained(trained.with_name("reference"))
    ours, theirs, before = (tensors_of(folder) for folder in (trained, trained.with_name("reference"), start))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() < within, name
        assert (tensor - before[name]).abs().max() > 1e-3, f"{name} did not move: nothing is tested"
