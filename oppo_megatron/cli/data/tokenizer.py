"""`oppo data tokenizer`: train a sentencepiece tokenizer on the texts of JSONL rows."""

from __future__ import annotations

import argparse
from pathlib import Path

from oppo_megatron.config.data import RowsConfig
from oppo_megatron.data.rows import Quarantine, RowProblems, read_rows
from oppo_megatron.data.tokenizer import train_sentencepiece
from oppo_megatron.data.values import read_value
from oppo_megatron.errors import ConfigError, DataError

HELP = "train a sentencepiece tokenizer on JSONL rows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="+", type=Path, metavar="DATA.jsonl")
    parser.add_argument("--out", required=True, type=Path, metavar="X.model")
    parser.add_argument("--vocab-size", required=True, type=int, metavar="N")
    parser.add_argument("--columns", metavar="A,B", help="columns to learn from; default: every column that holds text")


def run(args: argparse.Namespace) -> int:
    if args.out.suffix != ".model":
        raise ConfigError(f"--out is `{args.out}`, but a sentencepiece file must end in `.model`; rename it")
    if args.vocab_size < 1:
        raise ConfigError(f"--vocab-size is {args.vocab_size}, but must be positive; give the number of token ids")
    problems, texts = RowProblems(Quarantine(), configured=False), list[str]()
    columns = args.columns.split(",") if args.columns else None
    for row in read_rows(RowsConfig(path=args.data), problems):
        for column in columns or [name for name, value in row.values.items() if is_text(value)]:
            try:
                value = read_value(row, column)
            except DataError as error:
                problems.report(row.file, row.line, str(error), "error")
                continue
            texts += [value] if isinstance(value, str) else [str(message["content"]) for message in value]
    problems.raise_errors()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    train_sentencepiece(texts, args.out, args.vocab_size)
    print(f"{args.out}: a vocabulary of {args.vocab_size} from {len(texts)} texts")
    return 0


def is_text(value: object) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)
