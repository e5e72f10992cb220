"""A run whose rewards come from a service is the run that computes them itself, also where the service has bad days."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.rewards import brevity
from tests.support.ppo import SHAPE, Workspace, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks
from tests.support.reward_service import Service, http, reward_service, scored

ROOT = Path(__file__).resolve().parents[2]
TOKEN_ENV, TOKEN = "OPPO_TEST_REWARD_TOKEN", os.urandom(16).hex()
BREVITY = {"kind": "python", "entry_point": "tests.e2e.rewards:brevity", "options": {"limit": 40}, "weight": 0.25}
OVERLAPPED = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 3, "max": 3}}


@contextmanager
def service(folder: Path, name: str, config: dict[str, Any]) -> Iterator[str]:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"port": 0, "token_env": TOKEN_ENV, **config}))
    process = subprocess.Popen(
        [sys.executable, "-m", "oppo_megatron", "serve", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {TOKEN_ENV: TOKEN},
    )
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if line.startswith("serving rewards at ")), None)
        assert line is not None, "the service has ended"
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


def test_scores_of_services_are_those_of_the_run_itself(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    rules = [{"kind": "verifier", "name": "arithmetic"}, BREVITY]
    reward = {"init": SHAPE}
    model = {
        "rewards": [{"kind": "model"}],
        "reward": reward,
        "tokenizer": {"path": str(tmp_path / "tokenizer.model")},
        "max_tokens": 200,
        "runtime": {"device": "cpu"},
    }
    with ExitStack() as stack:
        isolated = {"rewards": [rules[0], BREVITY | {"isolate": True}]}
        services = [
            stack.enter_context(service(tmp_path, name, config)) for name, config in (("model", model), ("rules", isolated))
        ]
        asked = [{"kind": "http", "url": url, "token_env": TOKEN_ENV} for url in services]
        asked[0] |= {"weight": 0.0}
        far = workspace.config("far", steps=2, reward=None, rewards=asked[::-1], **OVERLAPPED)
        run_ranks(1, "tests.e2e.jobs:train_with_environment", config=far, environment={TOKEN_ENV: TOKEN})
    remote = read_outcome(Path(far["run_dir"]))
    local = run_ppo_ranks(
        workspace.config("near", steps=2, reward=reward, rewards=[*rules, {"kind": "model", "weight": 0.0}], **OVERLAPPED)
    )
    assert remote.rollouts == local.rollouts and len({row["reward"] for row in local.rollouts}) > 2
    labels = [url.partition("://")[2] for url in services]
    for far_step, near_step in zip(remote.metrics, local.metrics, strict=True):
        assert far_step["reward_mean"] == near_step["reward_mean"]
        near_model = near_step["reward_parts"]["model"]
        assert far_step["reward_parts"][labels[0]] == pytest.approx(near_model, abs=1e-5) and near_model != 0.0
    written = "".join(
        path.read_text(errors="replace") for path in Path(far["run_dir"]).rglob("*.*") if path.suffix != ".safetensors"
    )
    assert TOKEN not in written and TOKEN_ENV in written


def right(request: dict[str, Any]) -> bytes:
    return scored(request, lambda item: brevity(**{name: item[name] for name in ("prompt", "response", "fields")}, limit=40))


def late(request: dict[str, Any]) -> bytes:
    time.sleep(0.6)
    return right(request)


def lacking_one(request: dict[str, Any]) -> bytes:
    return right({"items": request["items"][1:]})


BAD_ANSWERS = [
    late,
    lambda request: http(200, b"<html>busy</html>"),
    lambda request: scored(request, lambda item: math.nan),
    lacking_one,
    lambda request: http(500, b"down"),
    lambda request: b"",
    lambda request: right(request)[:-9],
    lambda request: scored(request, lambda item: 1e9),
]


def one_bad_day(addresses: list[str], services: list[Service], done: threading.Event) -> None:
    with reward_service(*BAD_ANSWERS, otherwise=right) as service:
        services.append(service)
        addresses.append(service.url)
        while len(service.requests) < len(BAD_ANSWERS) + 2 and not done.is_set():
            time.sleep(0.01)
    time.sleep(1.0)
    port = int(service.url.rpartition(":")[2].partition("/")[0])
    with reward_service(otherwise=right, port=port) as again:
        services.append(again)
        done.wait(timeout=120)


@pytest.mark.long
def test_an_outage_in_a_run_loses_nothing_and_invents_nothing(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    changes: dict[str, Any] = {"reward": None, "placement": {"mode": "disaggregated"}, **OVERLAPPED}
    addresses: list[str] = []
    services: list[Service] = []
    done = threading.Event()
    bad_day = threading.Thread(target=one_bad_day, args=(addresses, services, done))
    bad_day.start()
    try:
        while not addresses:
            time.sleep(0.01)
        asked = {"kind": "http", "url": addresses[0], "weight": BREVITY["weight"], "timeout_s": 0.4}
        remote = run_ppo_ranks(workspace.config("far", rewards=[asked], **changes))
    finally:
        done.set()
        bad_day.join()
    local = run_ppo_ranks(workspace.config("near", rewards=[BREVITY], **changes))
    assert not services[0].script and services[1].requests, "the run ended before its service's bad day"
    assert remote.rollouts == local.rollouts and len({row["reward"] for row in local.rollouts}) > 2
    assert weight_distance(remote.actor, local.actor) == weight_distance(remote.critic, local.critic) == 0.0
