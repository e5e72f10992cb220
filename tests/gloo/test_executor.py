"""The executor on real ranks: it does what the schedule says, in its order, and never waits for ever."""

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint

from oppo_megatron.cluster.activity import Activity, Doing
from oppo_megatron.cluster.process_groups import use_once
from oppo_megatron.engine.executor import Executor, build_links
from oppo_megatron.errors import StallError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.timeline import simulate
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.support.ranks import run_mortal_ranks, run_ranks
from tests.support.schedules import build, colocated, disaggregated, make_round, make_site, split_scorers

JOBS = "tests.gloo.test_executor:"
CPU = torch.device("cpu")


@dataclass
class Parrot:
    """A role on this rank; `team`: its stage's tensor ranks, `everyone`: the role's; it dies in action `last_words`."""

    team: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    random: random.Random
    last_words: str | None = None

    def live(self, action: Action) -> bool:
        return True

    def compute(self, action: Action) -> int:
        time.sleep(self.random.random() * 1e-3)
        if str(action) == self.last_words:
            os._exit(9)
        group = self.everyone if action.op is Op.GATHER else self.team
        assert group is not None
        if group.size() > 1:
            words = [torch.zeros(5) for _ in range(group.size())]
            dist.all_gather(words, _words(action), group=group)
            assert all(torch.equal(word, _words(action)) for word in words), (str(action), words)
        return 1

    def outbox(self, action: Action) -> Sequence[Tensor]:
        parts = 2 if action.payload is Payload.CHUNK else 1
        return [_words(action) + part for part in range(parts)]

    def inbox(self, action: Action) -> Iterator[Tensor]:
        for part in range(2 if action.payload is Payload.CHUNK else 1):
            buffer = torch.zeros(5)
            yield buffer
            assert torch.equal(buffer, _words(action) + part), (str(action), buffer)


def _words(action: Action) -> Tensor:
    """The subject of an action, alike at both ends of a message and on all ranks of a stage."""
    kind = 0 if action.payload is not None else list(Op).index(action.op)
    step = -1 if action.step is None else action.step
    return torch.tensor([kind, sum(map(ord, action.role)), action.micro_batch, action.chunk, step], dtype=torch.float32)


@dataclass
class Outcome:
    done: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0


def carry_out(
    placements: dict[str, RolePlacement], schedules: Sequence[Schedule], late_s: float, last_words: tuple[int, str] | None = None,
    rounds: int = 1,
) -> list[Outcome]:  # fmt: skip
    """Run each schedule `rounds` times over links of its own, whose messages may be `late_s` late."""
    return [_carry_out(Site(placements), schedule, late_s, last_words, rounds) for schedule in schedules]


def _carry_out(site: Site, schedule: Schedule, late_s: float, last_words: tuple[int, str] | None, rounds: int) -> Outcome:
    rank, outcome = dist.get_rank(), Outcome()
    links = build_links(site)
    links.use_once(CPU)
    workers = {role: _worker(placement, rank, late_s) for role, placement in site.placements.items()}
    if last_words is not None and last_words[0] == rank:
        for worker in workers.values():
            worker.last_words = last_words[1]

    def observe(action: Action, start: float, end: float, size: int) -> None:
        assert action.rank == rank and start <= end
        assert size == (0 if action.op in (Op.SEND, Op.RECV) else 1)
        outcome.done.append(str(action))

    executor = Executor(rank, workers, links, late_s, CPU, observe)
    start = time.monotonic()
    try:
        for _ in range(rounds):
            executor.run(schedule.of(rank))
        executor.finish_sends()
    except StallError as error:
        outcome.error = str(error)
    outcome.seconds = time.monotonic() - start
    return outcome


def _worker(placement: RolePlacement, rank: int, late_s: float) -> Parrot:
    timeout = timedelta(seconds=late_s)
    teams = [placement.stage_ranks(d, p) for d in range(placement.dp) for p in range(placement.pp)]
    groups: list[Any] = [dist.new_group(list(team), timeout=timeout) for team in [*teams, placement.ranks]]
    use_once([group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER], CPU)
    mine = next((group for group, team in zip(groups, teams, strict=False) if rank in team), None)
    return Parrot(mine, groups[-1] if rank in placement.ranks else None, random.Random(rank))


TIMEOUT_S = 5.0  # a busy machine may let a rank wait for a part of it

SITES: dict[str, Site] = {
    "PP2": colocated((1, 2, 1)), "DP2 | 1": disaggregated((1, 1, 2), (1, 1, 1)), "PP2xDP2": colocated((1, 2, 2)),
    "TP2xPP2": colocated((2, 2, 1)), "PP2 | PP2": disaggregated((1, 2, 1), (1, 2, 1)),
    "PP4, scorers TP2xPP2": make_site((1, 4, 1), {role: (0, 2, 2, 1) for role in ("reference", "critic", "reward")}),
    "PP2, split": split_scorers((1, 2, 1)),
}  # fmt: skip


def ranks_of(site: Site) -> list[int]:
    return sorted({rank for placement in site.placements.values() for rank in placement.ranks})


def schedule_of(site: Site, generator: str = "woven") -> tuple[Schedule, Round]:
    round_ = make_round(site, steps=3, micro_batches=2, prefills=2)
    return add_communication(GENERATORS[generator](round_, site, Costs()), round_, site), round_


@pytest.mark.parametrize("name", SITES)
def test_what_is_done_is_what_the_schedule_says(name: str) -> None:
    """Every generator and random sound orders: order is kept, and each message is the one asked for."""
    site = SITES[name]
    made = [schedule_of(site, generator)[0] for generator in GENERATORS]
    made += [build(make_round(site, prefills=3), site, random.Random(seed)) for seed in range(3)]
    world = len(ranks_of(site))
    answers = run_ranks(world, f"{JOBS}carry_out", placements=site.placements, schedules=made, late_s=60.0)
    for rank, outcomes in enumerate(answers):
        for schedule, outcome in zip(made, outcomes, strict=True):
            assert outcome.error is None and outcome.done == [str(action) for action in schedule.of(rank)]


def test_rounds_follow_each_other_without_a_pause() -> None:
    """A rank may be rounds ahead of one that only listens; more of them than may be on their way at once."""
    site = disaggregated((1, 1, 1), (1, 1, 1))
    schedule = build(make_round(site, steps=1, micro_batches=1, prefills=1, prompts=0), site)
    answers = run_ranks(2, f"{JOBS}carry_out", placements=site.placements, schedules=[schedule], late_s=60.0, rounds=100)
    assert [len(outcomes[0].done) for outcomes in answers] == [100 * len(schedule.of(rank)) for rank in (0, 1)]


def without(schedule: Schedule, action: Action) -> Schedule:
    lists = dict(schedule.actions)
    lists[action.rank] = tuple(own for own in lists[action.rank] if own != action)
    return Schedule(lists)


def until(schedule: Schedule, action: Action) -> Schedule:
    own = schedule.of(action.rank)
    return Schedule({**schedule.actions, action.rank: own[: own.index(action)]})


WITHHELD: dict[str, tuple[str, Callable[[Action], bool]]] = {
    "PP2, a hidden state": ("PP2", lambda a: a.payload is Payload.HIDDEN and a.role == "actor" and a.step == 1),
    "DP2 | 1, the chunk": ("DP2 | 1", lambda a: a.payload is Payload.CHUNK),
}


@pytest.mark.parametrize("case", WITHHELD)
def test_a_withheld_message_is_named_by_all_who_wait_for_it(case: str) -> None:
    name, is_it = WITHHELD[case]
    site = SITES[name]
    schedule, round_ = schedule_of(site)
    lost = next(action for action in schedule if action.op is Op.SEND and is_it(action))
    broken = without(schedule, lost)
    stuck = simulate(broken, round_, site).stuck
    assert lost.peer in stuck
    answers = run_ranks(
        len(ranks_of(site)), f"{JOBS}carry_out", placements=site.placements, schedules=[broken], late_s=TIMEOUT_S,
    )  # fmt: skip
    for rank, (outcome,) in enumerate(answers):
        own = broken.of(rank)
        if rank not in stuck:
            # It has done its part; what it sent to a rank that did not get so far is never taken.
            assert outcome.done == [str(action) for action in own]
            assert outcome.error is None or named(outcome, own).op is Op.SEND
            continue
        assert outcome.done == [str(action) for action in own[: stuck[rank].position]]
        assert named(outcome, own) == stuck[rank].action
        assert f"rank {rank} waited" in str(outcome.error) and f"runtime.timeout_s is {TIMEOUT_S:g}" in str(outcome.error)
        assert outcome.seconds < len(answers) * TIMEOUT_S + 3


KILLED: dict[str, tuple[str, int, str]] = {
    "PP2, the last stage in its decoding": ("PP2", 1, "decode actor m1 c2 s1"),
    "PP2, the first stage in a prefill": ("PP2", 0, "prefill reward m1 c1"),
    "DP2 | 1, a replica before the gather": ("DP2 | 1", 1, "sample actor m0 c2 s2"),
    "TP2xPP2, one shard of a stage": ("TP2xPP2", 3, "decode actor m0 c2 s1"),
}


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_rank_is_felt_and_named_by_all_who_need_it(case: str) -> None:
    name, victim, text = KILLED[case]
    site = SITES[name]
    schedule, round_ = schedule_of(site)
    last = next(action for action in schedule.of(victim) if str(action) == text)
    stuck = simulate(until(schedule, last), round_, site).stuck
    world = len(ranks_of(site))
    survivors = set(range(world)) - {victim}
    assert survivors and survivors <= set(stuck), "all of them depend on it"
    answers = run_mortal_ranks(
        world, f"{JOBS}carry_out", placements=site.placements, schedules=[schedule], late_s=TIMEOUT_S, last_words=(victim, text),
    )  # fmt: skip
    assert answers[victim] is None
    for rank in survivors:
        assert answers[rank] is not None
        outcome, own = answers[rank][0], schedule.of(rank)
        waited = named(outcome, own)
        # At the latest where the dry run is stuck; sooner where the dead rank took a message along that it had sent.
        assert own.index(waited) <= stuck[rank].position, (str(waited), str(stuck[rank].action))
        assert waited.op in (Op.SEND, Op.RECV, Op.GATHER) or site.placements[waited.role].tp > 1
        assert outcome.done == [str(action) for action in own[: own.index(waited)]] or waited.op is Op.SEND
        assert outcome.seconds < world * TIMEOUT_S + 3


def named(outcome: Outcome, own: tuple[Action, ...]) -> Action:
    assert outcome.error is not None
    found = re.search(r"in vain for `([^`]+)`", outcome.error)
    assert found, outcome.error
    return next(action for action in own if str(action) == found[1])


PATIENCE_S = 30.0


def look_at_waits(folder: str) -> dict[str, Doing]:
    """The waits of rank 0 for the late rank 1, and where rank 1 is, which comes once rank 0 has been looked at in its call."""
    found: dict[str, Doing] = {}
    for name, call in _calls(folder).items():
        dist.barrier()
        activity = Activity(by_stack=True)
        look = threading.Thread(target=_look, args=(activity, name, Path(folder), found))
        with activity.doing("a wait for scores", waits=True):
            look.start()
            if dist.get_rank() == 1:
                _until((Path(folder) / f"looked at {name}").exists)
                look.join()
            call()
        look.join()
    return found


def _look(activity: Activity, name: str, folder: Path, found: dict[str, Doing]) -> None:
    if dist.get_rank() == 1:
        found[name] = activity.look()
        return
    _until((folder / "hanging").exists if name == "hangs" else lambda: activity.look().waits)
    found[name] = activity.look()
    (folder / f"looked at {name}").touch()


def _until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def _calls(folder: str) -> dict[str, Callable[[], Any]]:
    rank = dist.get_rank()
    links = build_links(Site({"actor": RolePlacement((0, 1), pp=2)}))
    parrot = Parrot(None, None, random.Random())
    executor = Executor(rank, {"actor": parrot}, links, 60.0, torch.device("cpu"), lambda *_: None)

    def message() -> None:
        op, peer = (Op.SEND, 0) if rank else (Op.RECV, 1)
        executor.run([Action(rank, op, "actor", 0, 0, payload=Payload.TOKENS, peer=peer)])
        executor.finish_sends()

    def hangs() -> None:
        if rank == 0:
            (Path(folder) / "hanging").touch()
            _until((Path(folder) / "looked at hangs").exists)

    return {
        "broadcast": lambda: dist.broadcast(torch.zeros(1), 1), "barrier": dist.barrier,
        "all_gather_object": lambda: dist.all_gather_object([None, None], "mine"),
        "weights": lambda: checkpoint.save({"weight": torch.zeros(1)}, checkpoint_id=str(Path(folder) / "weights")),
        "message": message, "hangs": hangs,
    }  # fmt: skip


def test_a_wait_is_told_from_the_stack(tmp_path: Path) -> None:
    waiting, late = run_ranks(2, f"{JOBS}look_at_waits", folder=str(tmp_path))
    assert not any(doing.waits for doing in late.values()), late
    assert {name: doing.waits for name, doing in waiting.items()} == {name: name != "hangs" for name in waiting}
    told = {name: doing.what.removeprefix("a wait for scores") for name, doing in waiting.items()}
    assert told["broadcast"] == ", in broadcast" and told["all_gather_object"] == ", in all_gather_object"
    assert told["weights"].endswith("_object") and told["hangs"] == "", told
