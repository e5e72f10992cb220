"""Tasks of lm-evaluation-harness: found by name, with data sets that are files or fetched, and their figures."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oppo_megatron.config.evaluation import all_tasks
from oppo_megatron.config.paths import missing_path
from oppo_megatron.errors import ConfigError

TaskConfig = dict[str, Any]
"""Settings of a task as in the harness's files: `include` names its own file; shots and data set may be replaced."""

TASKS_ENTRY = "oppo_megatron.evaluation.harness:run_rank"
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
        name, _, shots = each.partition("@")
        entry, own = index.get(name), {"num_fewshot": int(shots)} if shots else {}
        if each in found:
            problems.append(f"task {each} is named twice; once is enough")
        elif entry is None:
            near = difflib.get_close_matches(name, index, n=1)
            problems.append(f"task {name} is unknown; " + (f"did you mean `{near[0]}`?" if near else "see `lm-eval ls tasks`"))
        elif entry.kind.name not in ("TASK", "PY_TASK"):
            problems.append(f"task {name} is a group of tasks; name those of them that you want, each is a row of its own")
        elif int(shots or 0) and entry.cfg.get("num_fewshot") == 0:
            problems.append(f"task {each}: the harness measures it without examples; write {name}")
        else:
            given = {} if data is None else _local({**entry.cfg, **own}, data / name)
            found[each] = {"include": str(entry.yaml_path), "task": name, **given, **own}
            if read and (fault := _fault(found[each])):
                problems.append(f"task {each}: {fault}, for {option} {data or 'FOLDER'} in {data or 'FOLDER'}/{name}")
    if problems:
        raise ConfigError(problems)
    return found


def _local(settings: Mapping[str, Any], folder: Path) -> TaskConfig:
    """Replace the data set by a folder's `SPLIT.jsonl`, if there are some, and leave out other splits that are not read."""
    splits = {key: settings[key] for key in SPLITS if settings.get(key)}
    files = {split: str(path.resolve()) for split in splits.values() if (path := folder / f"{split}.jsonl").is_file()}
    examples = list(splits.values())[:1] if settings.get("num_fewshot") else []
    read = {*files, *examples, settings.get("test_split") or settings.get("validation_split")}
    absent = {key: None for key, split in splits.items() if split not in read}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}, **absent} if files else {}


def _fault(config: TaskConfig) -> str | None:
    try:
        task = load_task(config)
        examples, shots = len(list(task.fewshot_docs())), task.get_config("num_fewshot")
    except Exception as error:  # of a reader, of the network, or of a template without its column
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        return f"its data set cannot be read ({reason}); without a network, write it to files by split, as test.jsonl"
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        return "it runs code that the policy writes or shows images, which is not done here; leave it out"
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


def main_figure(result: Mapping[str, Any]) -> tuple[float, float | None]:
    """Mean and standard error of `acc_norm`, else of `acc`, else of the first metric."""
    metrics = result["metrics"]
    chosen = metrics[next((name for name in ("acc_norm", "acc") if name in metrics), next(iter(metrics)))]
    return chosen["mean"], chosen["error"]
