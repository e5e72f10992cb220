"""`oppo eval`: policies answer held-out prompts; reward parts or verifiers judge the responses."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from oppo_megatron.cli import generate
from oppo_megatron.cli.launch import external_ranks, launch
from oppo_megatron.config.explain import explain
from oppo_megatron.config.load import read_tree
from oppo_megatron.config.paths import missing_path
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.evaluation.grading import Answer, Grader, Judged, Measured, as_json, as_table
from oppo_megatron.evaluation.tasks import find_tasks
from oppo_megatron.layout.shape import check_head, max_positions
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.nesting import read_json
from oppo_megatron.policy.answers import OutputFile, Request
from oppo_megatron.policy.finding import ADAPTER_CONFIG, RUN_CONFIG, SHAPE, WEIGHTS, find_policy
from oppo_megatron.preflight.validate import check_source
from oppo_megatron.rundir.directory import write_json
from oppo_megatron.rundir.metrics_log import read_metrics

SHOWN_ROWS = 20
TASK_SETTINGS = "settings.json"
TASKS_ENTRY = "oppo_megatron.evaluation.tasks:run_rank"
WITHOUT_TASKS = (
    "verifier", "reward_model", "function", "url", "rewards", "template", "max_tokens", "temperature", "top_k",
    "top_p", "stop", "stop_id", "max_prompt_tokens", "column", "system",
)  # fmt: skip
ANSWER = itemgetter("row", "sample", "prompt", "response", "finish_reason", "tokens", "fields")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    generate.add_policy_arguments(parser, several=True)
    asked = parser.add_argument_group("held-out prompts")
    asked.add_argument("--data", type=Path, metavar="FILE", help="rows with a prompt, as `oppo train` reads them")
    generate.add_prompt_arguments(asked)
    tasks = parser.add_argument_group("tasks of lm-evaluation-harness, in place of prompts and judges")
    tasks.add_argument("--tasks", nargs="+", metavar="NAME[@SHOTS]", help="as hellaswag, or gsm8k@5; `paper`: the paper's five")
    tasks.add_argument(
        "--task-data", type=Path, metavar="DIR",
        help="their data sets, as DIR/gsm8k/test.jsonl; what it lacks is fetched by name. --max-prompts: of each task",
    )  # fmt: skip
    judges = parser.add_argument_group("what judges a response (at least one; each is a line of the table)")
    rules = ("arithmetic", "gsm8k", "math", "multiple_choice")
    judges.add_argument("--verifier", choices=rules, help="a rule that compares with --answer")
    judges.add_argument("--answer", default="answer", metavar="NAME", help="--verifier: column (default: %(default)s)")
    judges.add_argument("--reward-model", type=Path, metavar="DIR", help="a reward model, with its tokenizer")
    judges.add_argument("--function", action="append", metavar="PKG.MOD:FN", help="a function (prompt, response, fields)")
    judges.add_argument("--url", action="append", metavar="URL", help="a reward service")
    judges.add_argument(
        "--rewards", type=Path, metavar="FILE.yaml",
        help="`rewards` (and `reward`, `tokenizer`) as in a configuration of `oppo train`, which may be the file",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write eval.json and responses with scores, or tasks' results")
    generate.add_drawing_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Raises an OppoError before decoding if the request cannot be judged."""
    _require_consistent(args)
    if args.tasks:
        return _measure_tasks(args)
    grader = Grader(_judges(args), os.environ, summed=args.rewards is not None)
    _agree_on_prompts(args)
    with ExitStack() as stack:
        folder = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        requests = [_request(args, directory, _file(folder, place)) for place, directory in enumerate(args.directory)]
        first, *others = ([prompt.text for prompt in request.prompts] for request in requests)
        for directory, other in zip(args.directory[1:], others, strict=True):
            if other != first:
                raise DataError(
                    f"{directory} would be asked other prompts than {args.directory[0]}, as by another chat template; give one "
                    "with --template or --chat-template"
                )
        if requests[0].about_prompts:
            _tell(requests[0].about_prompts)
        requests = [_gradable(request, grader) for request in requests]
        for request in requests:
            _tell(request.policy.summary)
            if code := launch("eval", request, request.parallel.num_ranks, generate.ENTRY):
                return code
        files = [read_metrics(_file(folder, place)) for place in range(len(requests))]
        policies = _judge(args, grader, [[Answer(*ANSWER(line)) for line in lines] for lines in files])
        if args.out is not None:
            _write(args, policies, grader.labels)
    if args.json:
        print(json.dumps(as_json(policies, grader.labels, _settings(args))))
    else:
        print(as_table(policies, grader.labels))
    return 0


def _require_consistent(args: argparse.Namespace) -> None:
    problems = []
    if external_ranks(os.environ) is not None:
        problems.append("oppo eval starts its ranks itself; call it without a launcher, with --tp, --pp and --dp")
    if (args.data is None) == (args.tasks is None):
        problems.append(f"{'neither' if args.data is None else 'both'} of --data and --tasks given; give one of them")
    unused = [f"--{name.replace('_', '-')}" for name in WITHOUT_TASKS if getattr(args, name)] if args.tasks else []
    unused += ["-n"] if args.tasks and args.samples > 1 else []
    if args.task_data is not None and not args.tasks:
        problems.append("--task-data is given without --tasks; name tasks, or drop it")
    if unused:
        problems.append(f"{' and '.join(unused)} given with --tasks, whose prompts, judges and decoding are their own; drop it")
    elif not (args.tasks or args.verifier or args.reward_model or args.function or args.url or args.rewards):
        problems.append("nothing judges the responses; give --verifier, --reward-model, --function, --url or --rewards")
    resolved = [directory.resolve() for directory in args.directory]
    if len(set(resolved)) < len(resolved):
        problems.append("a DIR is given twice; name each policy once")
    if args.out is not None and args.out.exists() and not (args.tasks and (args.out / TASK_SETTINGS).exists()):
        if not args.out.is_dir() or any(args.out.iterdir()):
            problems.append(f"--out {args.out} is there already, and is not an empty folder; name another, or remove it")
    if problems:
        raise ConfigError(problems)
    if args.data is not None and not args.data.exists():
        raise DataError(missing_path("--data", args.data))


def _measure_tasks(args: argparse.Namespace) -> int:
    """Measure what `--out` does not hold yet, by the same settings."""
    with ExitStack() as stack:
        folder = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        requests = [_task_request(args, directory) for directory in args.directory]
        tasks = find_tasks(args.tasks, args.task_data, "--task-data", read=True)
        policies = [{"policy": each.policy.summary, "context": each.max_length} for each in requests]
        options = {"limit": args.max_prompts, "as_chat": args.as_chat}
        settings = {"policies": policies, "dtype": args.dtype, "tasks": tasks, **options}
        if (known := folder / TASK_SETTINGS).exists() and read_json(known.read_text(encoding="utf-8")) != settings:
            raise ConfigError(f"{known} is not of these policies, tasks and options; name another --out, or remove its files")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(known, settings)
        for place, request in enumerate(requests):
            left = {f"{name}-{place}": tasks[name] for name in tasks if not (folder / f"{name}-{place}.json").exists()}
            _tell(f"{request.policy.summary}: {len(left)} of {len(tasks)} tasks to measure")
            request = replace(request, to=OutputFile(folder, {"tasks": left, **options}))
            if left and (code := launch("eval", request, request.parallel.num_ranks, TASKS_ENTRY)):
                return code
        measured = [Measured(str(of), (), (), _figures(folder, place, tasks)) for place, of in enumerate(args.directory)]
    metrics = list(measured[0].found)
    record = as_json(measured, metrics, {"tasks": list(tasks), "max_prompts": args.max_prompts, "as_chat": args.as_chat})
    if args.out is not None:
        write_json(args.out / "eval.json", record)
    print(json.dumps(record) if args.json else as_table(measured, metrics))
    return 0


def _figures(folder: Path, place: int, tasks: Collection[str]) -> dict[str, Any]:
    results = {name: read_json((folder / f"{name}-{place}.json").read_text(encoding="utf-8"))["metrics"] for name in tasks}
    return {f"{name} {metric}": found for name, metrics in results.items() for metric, found in metrics.items()}


def _task_request(args: argparse.Namespace, directory: Path) -> Request:
    asked = {"directory": directory, "prompt": ["-"], "input": None, "chat": False, "output": None, "resume": False}
    request = generate.make_request(argparse.Namespace(**{**vars(args), **asked}))
    assert request is not None, "nothing is written"
    most = min(max_positions(request.policy.hf_config), generate.CHAT_LENGTH)
    return replace(request, max_length=args.context or most)


def _judges(args: argparse.Namespace) -> ServeConfig:
    from pydantic import ValidationError

    tree = {} if args.rewards is None else read_tree(args.rewards)
    parts: list[Any] = list(tree.get("rewards") or [])
    if args.rewards is not None and not parts:
        raise ConfigError(f"{args.rewards} has no `rewards`; give a file with a list of reward parts under this key")
    reward, tokenizer = tree.get("reward"), tree.get("tokenizer")
    if args.verifier:
        parts.append({"kind": "verifier", "name": args.verifier, "answer": args.answer})
    if args.reward_model is not None:
        if reward is not None:
            raise ConfigError(f"{args.rewards} has a reward model already; drop --reward-model, or that part")
        parts.append({"kind": "model"})
        model, weights = args.reward_model, args.reward_model / WEIGHTS
        is_run = (model / RUN_CONFIG).is_file() and not (model / SHAPE).is_file()
        if is_run and any((weights / name).is_file() for name in (SHAPE, ADAPTER_CONFIG)):
            model = weights  # the run's final ones
        reward, tokenizer = {"checkpoint": model}, {"path": model}
    parts += [{"kind": "python", "entry_point": name} for name in args.function or ()]
    parts += [{"kind": "http", "url": url} for url in args.url or ()]
    wanted: dict[str, Any] = {"rewards": parts, "runtime": {"device": args.device}}
    if any(isinstance(part, dict) and part.get("kind") == "model" for part in parts):
        wanted |= {"reward": reward, "tokenizer": tokenizer}
    try:
        config = ServeConfig.model_validate(wanted)
    except ValidationError as error:
        raise ConfigError([f"{args.rewards}: {problem}" for problem in explain(ServeConfig, error)]) from error
    if not any(part.kind == "model" for part in config.rewards):
        return config
    # Check the reward model's files before a policy is loaded.
    if config.reward is None or config.tokenizer is None:
        raise ConfigError(f"{args.rewards}: a part of kind model needs `reward` (the model) and `tokenizer` (its own); add them")
    where = "--reward-model" if args.reward_model is not None else "reward"
    if problems := check_source(where, config.reward):
        raise ConfigError(problems)
    hf_config = read_hf_config(config.reward)
    if problems := check_head(where, hf_config, scalar=True):
        raise ConfigError(problems)
    load_tokenizer(config.tokenizer)
    return config.model_copy(update={"max_tokens": max_positions(hf_config)})


def _agree_on_prompts(args: argparse.Namespace) -> None:
    """Give all policies the same prompt template and length, by default as in their runs."""
    choice = generate.choice_of(args)
    policies = [find_policy(directory, choice) for directory in args.directory]
    runs = [policy.run for policy in policies if policy.run is not None]
    args.date = next((policy for policy in policies if policy.run is not None), policies[0]).tokenizer.date
    if args.template is None and not args.as_chat:
        templates = sorted({run.data.prompt_template for run in runs})
        if len(templates) > 1:
            raise ConfigError(f"the policies' runs have other prompt templates ({templates}); choose with --template")
        args.template = templates[0] if templates else None
    lengths = [run.rollout.max_response_tokens for run in runs if isinstance(run, TrainSettings)]
    if args.max_tokens is None and lengths:
        args.max_tokens = max(lengths)


def _file(folder: Path, place: int) -> Path:
    return folder / f"responses-{place}.jsonl"


def _request(args: argparse.Namespace, directory: Path, output: Path) -> Request:
    asked = {"directory": directory, "prompt": None, "input": args.data, "chat": False, "output": output}
    request = generate.make_request(argparse.Namespace(**{**vars(args), **asked, "resume": False, "json": False}))
    assert request is not None, "the file is new"
    return request


def _gradable(request: Request, grader: Grader) -> Request:
    """Return the rows that can be scored, and report the others. Raises as `Grader.check`."""
    refused = grader.check({prompt.row: prompt.fields for prompt in request.prompts}, request.max_length, _tell)
    for row, why in list(refused.items())[:SHOWN_ROWS]:
        _tell(f"row {row} of the data is set aside, because it cannot be scored: {why}")
    if len(refused) > SHOWN_ROWS:
        _tell(f"{len(refused)} rows of the data are set aside in all")
    kept = [prompt for prompt in request.prompts if prompt.row not in refused]
    return replace(request, prompts=tuple(replace(prompt, seq_id=place) for place, prompt in enumerate(kept)))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _judge(args: argparse.Namespace, grader: Grader, answers: Sequence[Sequence[Answer]]) -> list[Judged]:
    _tell(f"judging {sum(map(len, answers))} responses by {', '.join(grader.labels)}")
    names = [str(directory) for directory in args.directory]
    with grader.opened() as grade:
        flat = grade([answer for of_policy in answers for answer in of_policy])
    grades = iter(flat)
    return [Judged(name, of, [next(grades) for _ in of]) for name, of in zip(names, answers, strict=True)]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = (
        "data", "max_prompts", "max_prompt_tokens", "template", "as_chat", "samples", "max_tokens", "temperature", "top_k",
        "top_p", "seed",
    )  # fmt: skip
    return {name: str(value) if isinstance(value := getattr(args, name), Path) else value for name in names}


def _write(args: argparse.Namespace, policies: Sequence[Judged], labels: Sequence[str]) -> None:
    """Write `eval.json`, and add the scores to the response files."""
    for place, policy in enumerate(policies):
        path = _file(args.out, place)
        scored = [{**line, "scores": grade} for line, grade in zip(read_metrics(path), policy.grades, strict=True)]
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in scored), encoding="utf-8")
    (args.out / "eval.json").write_text(json.dumps(as_json(policies, labels, _settings(args)), indent=1) + "\n")
