"""Tasks of lm-evaluation-harness: found by name, with data sets that are files or fetched, and their figures."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from oppo_megatron.clock import to_stderr
from oppo_megatron.config.evaluation import all_tasks
from oppo_megatron.config.paths import missing_path
from oppo_megatron.errors import ConfigError
from oppo_megatron.policy.answers import OutputFile, Request
from oppo_megatron.policy.finding import policy_tokenizer
from oppo_megatron.rundir.directory import write_json

if TYPE_CHECKING:
    from oppo_megatron.policy.answering import LoadedPolicy

TaskConfig = dict[str, Any]
"""Settings of a task as in the harness's files: `include` names its own file; shots and data set may be replaced."""

SPLITS = ("fewshot_split", "training_split", "validation_split", "test_split")


def find_tasks(names: Sequence[str], data: Path | None, option: str, *, read: bool = False) -> dict[str, TaskConfig]:
    """Settings by NAME or NAME@SHOTS; `read` the data sets, too.  Raises ConfigError with all faults; `option` gives `data`."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"tasks need lm-evaluation-harness, which cannot be imported ({error}); install it: pip install "
            "'oppo-megatron[lm-eval]', or pip install '.[lm-eval]' in a copy of the source"
        ) from error
    if data is not None and not data.is_dir():
        raise ConfigError(missing_path(option, data))
    index, found, problems = TaskManager().task_index, dict[str, TaskConfig](), list[str]()
    for each in all_tasks(names):
        name, at, shots = each.partition("@")
        entry = index.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, index, n=1)
            problems.append(f"task {name} is unknown; " + (f"did you mean `{near[0]}`?" if near else "see `lm-eval ls tasks`"))
        elif entry.kind.name not in ("TASK", "PY_TASK"):
            problems.append(f"task {name} is a group; name the tasks in it that you want")
        elif at and not shots.isdecimal():
            problems.append(f"task {each} has no number of examples after @; write it as {name}@5, or {name}")
        else:
            own = {"num_fewshot": int(shots)} if at else {}
            given = {} if data is None else _local(entry.cfg, data / name)
            found[each] = {"include": str(entry.yaml_path), "task": name, **given, **own}
            if read and (fault := _fault(found[each], f"{option} FOLDER" if data is None else str(data))):
                problems.append(f"task {each}: {fault}")
    if problems:
        raise ConfigError(problems)
    return found


def _local(settings: Mapping[str, Any], folder: Path) -> TaskConfig:
    """Replace the data set by the `SPLIT.jsonl` of a folder, if it exists."""
    splits = {settings[key] for key in SPLITS if settings.get(key)}
    files = {split: str(path.resolve()) for split in sorted(splits) if (path := folder / f"{split}.jsonl").is_file()}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}} if folder.is_dir() else {}


def _fault(config: TaskConfig, folder: str) -> str | None:
    try:
        task = load_task(config)
        examples, shots = len(list(task.fewshot_docs())), task.get_config("num_fewshot")
    except Exception as error:  # of a reader, of the network, or of a template without its column
        cause = error.__cause__ or error  # the row that cannot be read
        reason = f"{type(cause).__name__}: {str(cause)[:300]}"
        place = f"{folder}/{config['task']}"
        return f"its data set cannot be read ({reason}); put the data set's own rows by split, as test.jsonl, into {place}"
    if {"UNSAFE_CODE", "MULTIMODAL"} & vars(task).keys() or task.OUTPUT_TYPE == "loglikelihood_rolling":
        return "it runs code of the policy, shows images or measures perplexities, which is not done here; leave it out"
    return f"it has {examples} examples for {shots} shots; ask for fewer, or write more" if examples < shots else None


def load_task(config: TaskConfig) -> Any:
    """Return a task of lm_eval, and read its data set."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.tasks import TaskManager

    with TemporaryDirectory() as folder:
        path = Path(folder) / "task.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")
        (task,) = TaskManager(include_defaults=False).load([str(path)])["tasks"].values()
    task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return task


def measure_tasks(
    tasks: Mapping[str, TaskConfig], policy: LoadedPolicy, num_slots: int, limit: int | None, tell: Callable[[str], None],
    *, as_chat: bool = False,
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """Yield each task's name and result on the rank that leads: shots, versions and `metrics`.  Collective.

    `as_chat`: put prompts into the policy's chat template, each example as two turns.
    """
    if not policy.leads:
        while policy.answer(None) is not None:
            pass
        return
    import lm_eval

    from oppo_megatron.evaluation.harness import PolicyLM

    try:
        for name, config in tasks.items():

            def say(line: str, name: str = name) -> None:
                tell(f"{name}: {line}")

            task, lm = load_task(config), PolicyLM(policy, num_slots, say)
            chat = {"apply_chat_template": as_chat, "fewshot_as_multiturn": as_chat}
            found = lm_eval.evaluate(lm, {"tasks": {task.task_name: task}}, limit=limit, **chat)
            about = {"lm_eval": lm_eval.__version__, "version": task.VERSION, "shots": task.get_config("num_fewshot")}
            yield name, {**about, "metrics": dict(_metrics(found))}
    finally:
        policy.answer(None)


def _metrics(found: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Mean, the harness's standard error, and values by document of each metric."""
    (figures,), (samples,) = found["results"].values(), found["samples"].values()
    for key in figures:
        metric, comma, filtered = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            error, rows = figures[f"{metric}_stderr,{filtered}"], [each for each in samples if each["filter"] == filtered]
            values = {each["doc_id"]: float(each[metric]) for each in rows if isinstance(each.get(metric), int | float)}
            name, mean = metric if filtered == "none" else f"{metric} {filtered}", float(figures[key])
            yield name, {"mean": mean, "error": None if error == "N/A" else float(error), "documents": values}


def main_figure(result: Mapping[str, Any]) -> tuple[float, float | None]:
    """Mean and standard error of `acc_norm`, else of `acc`, else of the first metric."""
    metrics = result["metrics"]
    chosen = metrics[next((name for name in ("acc_norm", "acc") if name in metrics), next(iter(metrics)))]
    return chosen["mean"], chosen["error"]


def run_rank(kind: str, request: Request) -> int:
    """The entry point of every rank of `oppo eval --tasks`."""
    from oppo_megatron.cluster.world import choose_device, open_world
    from oppo_megatron.policy.answering import build_place, load_policy

    choose_device(request.runtime)
    with open_world(request.runtime) as world:
        tokenizer, place, to = policy_tokenizer(request.policy), build_place(world, request.parallel), request.to
        assert isinstance(to, OutputFile)
        policy = load_policy(request.policy, place, request.runtime, tokenizer, request.max_length)
        tasks, limit, as_chat = (to.settings[key] for key in ("tasks", "limit", "as_chat"))
        for name, result in measure_tasks(tasks, policy, request.num_slots, limit, to_stderr, as_chat=as_chat):
            write_json(to.path / f"{name}.json", result)
    return 0
