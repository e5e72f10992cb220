"""Tests if PPO and GRPO learn, and if the overlaps change it: generated word problems, several seeds, held-out accuracy.

    python -m benchmarks.quality --out runs/bench/quality

`oppo sft` teaches a new model; then the verifier rewards it.  The same command continues what was interrupted.  When sft has
ended, several processes can share a folder, each with its `--runs`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import run_script
from benchmarks.seeds import reward_half
from oppo_megatron import api
from oppo_megatron.bench.figures import describe_machine
from oppo_megatron.bench.suite import BenchStopped
from oppo_megatron.data.tokenizer import train_sentencepiece
from oppo_megatron.errors import ConfigError
from oppo_megatron.nesting import read_json
from oppo_megatron.report.charts import Line, LineChart, draw, run_colour, smooth
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import read_metrics

ALGORITHMS, OVERLAPS = ("ppo", "grpo"), ("off", "on")
MODEL = {
    "model_type": "qwen2", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1792, "vocab_size": 512, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = MODEL | {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704, "initializer_range": 0.04}
LARGE = {
    "model": MODEL, "dtype": "float32", "lr": 8.0e-4, "rl_lr": 1.0e-5, "sft_steps": 250, "steps": 48, "every": 12,
    "drawn": 20000, "heldout": 1000, "prompts": 3840,
}  # fmt: skip
SIZES = {"large": LARGE, "small": LARGE | {"model": SMALL, "lr": 1.5e-3, "rl_lr": 1.0e-4}}
SIZES["quick"] = SIZES["small"] | {"sft_steps": 2, "steps": 2, "every": 1, "drawn": 2000, "heldout": 20, "prompts": 128}
BATCH, VERIFIER = 64, {"kind": "verifier", "name": "gsm8k"}
PROMPT = {"prompt_template": "Question: {prompt}\nAnswer:"}  # the harness's prompt of gsm8k without examples
COLUMNS = {
    "run": "runs", "seeds": "seeds", "reward, first tenth": "first", "second half": "half", "se": "half_se",
    "held-out before": "before", "after": "after", "se ": "after_se", "gain": "gain", "se  ": "gain_se",
}  # fmt: skip
NAMES = "Tom Mia Ben Ana Sam Eva Max Lea Jan Ida Leo Zoe".split()
THINGS = "apples books coins stamps cards shells stones pens".split()
GAINS = "buys {n} more, finds {n}, wins {n}, gets {n} as a gift, makes {n}, borrows {n}".split(", ")
LOSSES = "gives away {n}, loses {n}, sells {n}, throws away {n}, breaks {n}, lends {n}".split(", ")


def problem(rng: random.Random) -> dict[str, str]:
    """Return a word problem of two or three operations, and its solution, one operation per line; results are in 0..20."""
    name, thing, total = rng.choice(NAMES), rng.choice(THINGS), rng.randint(3, 15)
    text, lines = [f"{name} has {total} {thing}."], []
    for _ in range(rng.randint(2, 3)):
        n = rng.randint(2, 9)
        gains = total < n or (total + n <= 20 and rng.random() < 0.5)
        text.append(f"{name} {rng.choice(GAINS if gains else LOSSES).format(n=n)}.")
        lines.append(f"{total}{'+' if gains else '-'}{n}={total + n if gains else total - n}")
        total += n if gains else -n
    question = " ".join([*text, f"How many {thing} has {name}?"])
    return {"question": question, "answer": "\n".join([*lines, f"#### {total}"])}


def write_inputs(out: Path, size: Mapping[str, Any]) -> None:
    """Write held-out problems (also as the harness's gsm8k), demonstrations, other problems for RL, and a tokenizer."""
    rng = random.Random(1)  # noqa: S311  (not for secrets)
    rows = iter({row["question"]: row for row in (problem(rng) for _ in range(size["drawn"]))}.values())
    parts = {name: list(islice(rows, size.get(name))) for name in ("heldout", "prompts", "sft")}
    parts |= {"gsm8k/test": parts["heldout"], "gsm8k/train": parts["prompts"][:9]}
    for row in parts["sft"][::2]:  # right work, but the last line repeats the result before the last
        *work, before, last, _ = row["answer"].split("\n")
        row["answer"] = "\n".join([*work, before, last, f"#### {before.partition('=')[2]}"])
    (out / "data" / "gsm8k").mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (out / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    texts = [PROMPT["prompt_template"].format(prompt=row["question"]) + f" {row['answer']}" for row in parts["sft"][:3000]]
    train_sentencepiece(texts, out / "tokenizer.model", size["model"]["vocab_size"])


def sft_settings(out: Path, size: Mapping[str, Any]) -> dict[str, Any]:
    template = PROMPT | {"completion_template": " {completion}"}
    return {
        "run_dir": out / "sft", "steps": size["sft_steps"], "epochs": 8, "batch_size": 32, "max_tokens": 160,
        "tokenizer": {"path": out / "tokenizer.model"}, "data": {"path": out / "data" / "sft.jsonl", **template},
        "evaluation": {"data": {"path": out / "data" / "heldout.jsonl", **template}, "every_steps": 50, "max_rows": 200},
        "model": {"init": size["model"], "dtype": size["dtype"]}, "parallel": {"dp": 2},
        "optimizer": {"lr": size["lr"], "min_lr": size["lr"] / 10, "warmup_steps": 20, "decay": "cosine"},
        "runtime": {"device": "cpu"}, "logging": {"console": "plain"},
    }  # fmt: skip


def rl_settings(out: Path, algorithm: str, overlap: str, seed: int, size: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings: the actor on one rank, on another the reference, and the critic of PPO."""
    start, on, group = out / "sft" / "weights", overlap == "on", 8 if algorithm == "grpo" else 1
    optimizer = {"lr": size["rl_lr"], "warmup_steps": 5, "decay": "linear"}
    settings: dict[str, Any] = {
        "run_dir": out / f"{algorithm}-{overlap}-{seed}", "seed": seed, "steps": size["steps"],
        "algorithm": {"preset": algorithm}, "placement": {"mode": "disaggregated"}, "tokenizer": {"path": start},
        "data": {"path": out / "data" / "prompts.jsonl", **PROMPT, "max_prompt_tokens": 64},
        "actor": {"checkpoint": start, "optimizer": optimizer}, "rewards": [VERIFIER],
        "rollout": {"batch_size": BATCH, "group_size": group, "max_response_tokens": 32},
        "ppo": {"minibatches": 2, "kl": {"coefficient": 0.005}},
        "overlap": {"intra": on, "inter": on, "chunk": 16, "delta": {"rule": "fixed", "initial": 16 // group, "max": 16}},
        "runtime": {"device": "cpu", "dtype": size["dtype"]}, "logging": {"console": "plain", "trace": False},
        "evaluation": {
            "data": {"path": out / "data" / "heldout.jsonl", **PROMPT, "max_prompt_tokens": 64, "max_rows": 500},
            "metrics": [VERIFIER], "every_steps": size["every"],
        },
    }  # fmt: skip
    if algorithm == "ppo":
        settings["critic"] = {"checkpoint": start, "optimizer": optimizer | {"lr": 2 * size["rl_lr"]}}
        settings["ppo"] |= {"critic_warmup_steps": 1, "gae_lambda": 1.0, "value_clip": 0.0}
    return settings


def figures(out: Path, name: str) -> dict[str, Any]:
    """Return a finished run's reward by step, held-out accuracy by step, and the numbers that seeds are averaged over."""
    run, (algorithm, overlap, seed) = RunDirectory(out / name), name.split("-")
    lines, summary = read_metrics(run.metrics), read_json(run.summary.read_text(encoding="utf-8"))
    heldout = {int(step): each["mean"]["accuracy"] for step, each in summary["heldout"].items()}
    errors = {int(step): each["error"]["accuracy"] for step, each in summary["heldout"].items()}
    reward, before, after = [line["reward_mean"] for line in lines], heldout[0], heldout[max(heldout)]
    means = {"first": fmean(reward[: -(-len(reward) // 10)]), "half": reward_half(lines), "before": before, "after": after}
    about = {"algorithm": algorithm, "overlap": overlap, "seed": int(seed), "deferred": summary["deferred"]}
    about |= {"means": means | {"gain": after - before}, "heldout": heldout, "heldout_errors": errors}
    return about | {"reward": [round(value, 4) for value in reward]}


def standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def table(runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield means over seeds and their standard errors, for each algorithm without and with overlap, then on - off by seed."""
    for algorithm in ALGORITHMS:
        off, on = ({run["seed"]: run["means"] for run in runs if (run["algorithm"], run["overlap"]) == (algorithm, at)}
                   for at in OVERLAPS)  # fmt: skip
        pairs = [{key: on[seed][key] - value for key, value in off[seed].items()} for seed in sorted(off.keys() & on.keys())]
        for name, rows in (("off", [*off.values()]), ("on", [*on.values()]), ("on - off", pairs)):
            columns = {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}
            errors = {f"{key}_se": standard_error(column) for key, column in columns.items()}
            yield {"runs": f"{algorithm} {name}", "seeds": len(rows), **{k: fmean(v) for k, v in columns.items()}, **errors}


def curves(runs: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Yield held-out accuracy with its standard errors over seeds (of one seed, over problems), and faintly the reward."""
    for place, (algorithm, at) in enumerate(product(ALGORITHMS, OVERLAPS)):
        mine = [run for run in runs if (run["algorithm"], run["overlap"]) == (algorithm, at)]
        if mine:
            name, colour, points = f"{algorithm}, overlap {at}", run_colour(place), list(mine[0]["heldout"])
            reward = smooth([fmean(values) for values in zip(*(run["reward"] for run in mine), strict=True)])
            yield Line(name, range(1, len(reward) + 1), reward, colour, "faint")
            heldout = [[run["heldout"][step] for run in mine] for step in points]
            errors = [standard_error(each) for each in heldout] if len(mine) > 1 else [*mine[0]["heldout_errors"].values()]
            yield Line(name, points, [fmean(each) for each in heldout], colour, errors=errors)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/bench/quality"), metavar="DIR", help="default %(default)s")
    parser.add_argument("--runs", nargs="+", metavar="NAME", help="some of ppo-off-1, grpo-on-3 ...; default all twelve")
    parser.add_argument("--table", action="store_true", help="train nothing; show the finished runs")
    parser.add_argument("--size", choices=SIZES, default="small", help="31 M parameters, 3 M, or a test; default %(default)s")


def measure(args: argparse.Namespace) -> int:
    out, size = args.out, SIZES[args.size]
    names = {f"{kind}-{at}-{seed}": (kind, at, seed) for seed in (1, 2, 3) for kind in ALGORITHMS for at in OVERLAPS}
    if unknown := sorted(set(args.runs or ()) - names.keys()):
        raise ConfigError(f"--runs names {', '.join(unknown)}; choose from {', '.join(names)}")
    for name in [] if args.table else args.runs or names:
        if not (out / "tokenizer.model").is_file():
            write_inputs(out, size)
        for kind, settings in (("sft", sft_settings(out, size)), ("train", rl_settings(out, *names[name], size))):
            run = RunDirectory(settings["run_dir"])
            if not run.finished and not api.train(settings, kind=kind, resume=True).finished:
                raise BenchStopped(f"stopped in {run.path}; the same command continues with it")
    found = {name: figures(out, name) for name in names if RunDirectory(out / name).finished}
    if not found:
        raise ConfigError(f"{out} has no finished run; leave out --table, or name another --out")
    rows = list(table(list(found.values())))
    write_json(out / "quality.json", {"machine": describe_machine(), "results": rows, "runs": found})
    title = "Held-out problems solved, greedy (faint: trained responses, sampled)"
    draw(LineChart("quality", title, "step", "share", list(curves(list(found.values()))))).savefig(out / "quality.png")
    print(format_table(COLUMNS, rows), f"missing: {', '.join(name for name in names if name not in found) or 'none'}", sep="\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.quality", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
