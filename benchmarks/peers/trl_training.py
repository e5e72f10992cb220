"""TRL's own trainer on the work that a JSON file describes, and how long each step of it took.

Runs in the environment of `requirements-trl.txt` and imports nothing of oppo_megatron; `compare.py` writes WORK.json
(`work.py` says what is in it) and reads RESULT.json.  The trainer's code is unchanged.  Additions around it:

- the prompts come in their order (TRL shuffles them);
- a logits processor bans EOS and the padding token until a row's forced length is reached, and lets nothing but EOS be
  drawn there: TRL ends, pads and masks the row as it does any other.  The seconds that this takes are measured;
- a clock records the calls at which TRL changes phase (`Clock`);
- with bfloat16, generation and scoring run under autocast as training does: accelerate wraps the training forward only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.peers.trl_common import Batch, Clock, ForcedGenerate, PeerError

REQUIREMENTS = Path(__file__).with_name("requirements-trl.txt")
EXIT_WRONG_INPUT = 2


def main(arguments: Sequence[str]) -> int:
    any_build = list(arguments[:1]) == ["--any-build"]
    arguments = arguments[any_build:]
    try:
        pinned = REQUIREMENTS.read_text(encoding="utf-8")
        versions = require_versions(pinned, installed, ["trl"] if any_build else None)
        if list(arguments) == ["--check"]:
            print(json.dumps(versions))
            return 0
        if len(arguments) != 2:
            raise PeerError("usage: trl_run.py WORK.json RESULT.json, or --check; compare.py makes these calls")
        work = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        result = train(work, Path(arguments[1]).with_suffix(".jsonl"))
    except PeerError as error:
        print(f"trl_run: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    Path(arguments[1]).write_text(json.dumps({"versions": versions, **result}, indent=1) + "\n", encoding="utf-8")
    return 0


def installed(package: str) -> str | None:
    """Return the version of a package in this environment; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require_versions(
    requirements: str, version_of: Callable[[str], str | None], held: Sequence[str] | None = None
) -> dict[str, str]:
    """Return the installed versions of the packages that `requirements` pins.

    Raises PeerError if one is missing, or if one of `held` (null: all) differs from its pin.
    """
    pins = [line.split("==") for line in requirements.splitlines() if "==" in line and not line.startswith("#")]
    found = {name: version_of(name) or "none" for name, _ in pins}
    # The text after the plus sign identifies a build: 2.13.0+cpu is 2.13.0.
    wrong = [
        f"{name} {found[name]} (pinned: {pin})"
        for name, pin in pins
        if found[name] == "none" or (found[name].split("+")[0] != pin and (held is None or name in held))
    ]
    if wrong:
        raise PeerError(
            f"TRL's environment has {', '.join(wrong)}; remove it and run `make bench-trl`, which installs what "
            f"{REQUIREMENTS.name} pins"
        )
    return found


def train(work: Mapping[str, Any], lines: Path) -> dict[str, Any]:
    """Train all steps, each a line of `lines`.  Returns the device, the precision and what each step took and held."""
    import torch

    if work["device"] == "cuda" and not torch.cuda.is_available():
        raise PeerError(f"the device is to be cuda, but torch {torch.__version__} of this environment finds none")
    torch.set_num_threads(work["threads"])
    precision = "bf16" if work["dtype"] == "bfloat16" else "no"
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision  # the `bf16` option of TRL's PPO sets nothing

    peer = _peer(work)
    trainer, clock = peer.build_trainer(work), Clock(torch.cuda.synchronize if work["device"] == "cuda" else _nothing)
    if trainer.accelerator.mixed_precision != precision:
        raise PeerError(f"accelerate computes in {trainer.accelerator.mixed_precision!r}, not in {precision!r}")
    models = peer.models(trainer)
    policy = models["actor"]
    policy.generate = generate = ForcedGenerate(policy.generate, work)
    steps: list[dict[str, Any]] = []
    batches: list[Any] = []

    def autocast() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(work["device"], torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()

    def step_end() -> None:
        seconds = clock.end()
        steps.append(seconds | _step(work, generate, peer.batch_of(work, batches.pop()), len(steps)))
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(steps[-1]) + "\n")
        clock.begin()

    with peer.watched(trainer, clock, autocast, batches.append):
        trainer.add_callback(_step_end(step_end))
        clock.begin()
        trainer.train()
    _require_finite(peer.METRICS, trainer.state.log_history, steps)
    return {
        "device": trainer.accelerator.device.type,
        "device_name": torch.cuda.get_device_name() if work["device"] == "cuda" else None,
        "threads": torch.get_num_threads(),
        "mixed_precision": precision,
        "attention": policy.config._attn_implementation,
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
        "steps": steps,
    }


def _peer(work: Mapping[str, Any]) -> Any:
    """The module of the algorithm's trainer."""
    from benchmarks.peers import trl_grpo, trl_ppo

    return trl_grpo if work["algorithm"] == "grpo" else trl_ppo


def _step_end(act: Callable[[], None]) -> Any:
    from transformers import TrainerCallback

    class StepEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            act()

    return StepEnd()


def _step(work: Mapping[str, Any], generate: ForcedGenerate, batch: Batch, number: int) -> dict[str, Any]:
    """The tokens of a finished step's rows as TRL has them, and what forcing their lengths took."""
    rows = slice(number * work["batch_size"], (number + 1) * work["batch_size"])
    if batch.prompts != work["prompts"][rows]:
        raise PeerError(f"step {number + 1} of TRL has other prompts than rows {rows.start} to {rows.stop - 1} of the work")
    found = {
        "prompt_tokens": [len(prompt) for prompt in batch.prompts],
        "response_tokens": [len(response) for response in batch.responses],
        "ended_by_eos": sum(work["eos_id"] in response for response in batch.responses),
        "computed_tokens": batch.computed_tokens,
        "forcing_s": generate.seconds,
    }
    generate.seconds = 0.0
    return found


def _require_finite(names: Mapping[str, str], history: Sequence[Mapping[str, Any]], steps: list[dict[str, Any]]) -> None:
    """Check TRL's metrics of each step, stored with it.  Raises PeerError if one is not finite."""
    metrics_of_steps = [metrics for metrics in history if all(theirs in metrics for theirs in names.values())]
    for number, (step, metrics) in enumerate(zip(steps, metrics_of_steps, strict=True), start=1):
        step |= {ours: metrics[theirs] for ours, theirs in names.items()}
        if wrong := [theirs for theirs in names.values() if not math.isfinite(metrics[theirs])]:
            raise PeerError(f"step {number} of TRL has no finite {', '.join(wrong)}: it did not train")


def _nothing() -> None:
    """A CPU has nothing to wait for."""
