"""Runs in TRL's environment: a row's tokens and labels as its PRMTrainer makes them, and the loss that it trains with.

python trl_prm.py TOKENIZER SCALAR_MODEL < rows.json     {"tokens": [...], "labels": [...], "loss": ...}

The two-logit model is the scalar model with a second logit that is 0: their difference is the scalar.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Qwen2ForTokenClassification,
)
from trl.experimental.prm import PRMTrainer


def main(tokenizer_path: str, model_path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    tokenizer.pad_token = tokenizer.eos_token
    rows = [
        PRMTrainer.tokenize_row(row, tokenizer, "\n", None, None, train_on_last_step_only=False, is_eval=False)
        for row in json.load(sys.stdin)
    ]
    scalar = AutoModelForSequenceClassification.from_pretrained(model_path, dtype=torch.float32)
    config = scalar.config
    config.num_labels = 2
    model = Qwen2ForTokenClassification(config).eval()
    model.model.load_state_dict(scalar.model.state_dict())
    with torch.no_grad():
        model.score.weight.zero_()
        model.score.bias.zero_()
        model.score.weight[1] = scalar.score.weight[0]
        loss = model(**DataCollatorForTokenClassification(tokenizer)(rows)).loss
    found = {"tokens": [row["input_ids"] for row in rows], "labels": [row["labels"] for row in rows]}
    print(json.dumps({**found, "loss": float(loss)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
