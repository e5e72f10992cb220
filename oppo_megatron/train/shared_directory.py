"""Prints the hosts of the ranks, and checks that all hosts share the run directory."""

from __future__ import annotations

import time
from dataclasses import asdict

import torch.distributed as dist

from oppo_megatron.cluster.hosts import show_hosts
from oppo_megatron.cluster.world import World
from oppo_megatron.errors import ConfigError
from oppo_megatron.rundir.directory import RUN_FORMAT, RunDirectory, write_json

VISIBLE_WITHIN_S = 60.0  # network file systems show a new file late


def share_run_directory(run: RunDirectory, world: World, *, owner: bool, show: bool) -> None:
    """Every rank calls this; `owner` has made the run directory.  From here on every rank may write into it.

    Writes `hosts.json`; rank 0 prints the map to stderr if `show`.  Raises ConfigError on a
    host that does not see the run directory.
    """
    if show and world.rank == 0:
        show_hosts(world.hosts)
    if owner:
        write_json(run.hosts, {"format": RUN_FORMAT, "ranks": [asdict(rank) for rank in world.hosts]})
    dist.barrier()
    until = time.monotonic() + VISIBLE_WITHIN_S
    while not run.hosts.exists():
        if time.monotonic() > until:
            raise ConfigError(
                f"run_dir: {run.path} does not show on {world.hosts[world.rank]} what another rank wrote into it; "
                "ranks on several hosts need a run_dir on a file system that all of them share"
            )
        time.sleep(0.5)
