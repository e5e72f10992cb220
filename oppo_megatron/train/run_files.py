"""A role's weights as a Hugging Face directory, and the run directory shared by all hosts."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oppo_megatron.cluster.hosts import show_hosts
from oppo_megatron.cluster.world import World
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.tokenizer import Tokenizer, special_ids, write_tokenizer
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.mcore.training import Chunks, as_chunks
from oppo_megatron.mcore.weights.hf_weights import export_weights
from oppo_megatron.rundir.directory import RUN_FORMAT, RunDirectory, write_json
from oppo_megatron.rundir.disk import free_bytes, megabytes


def save_role(
    model: Chunks, directory: Path, tokenizer: Tokenizer, base: Path | None = None, stop_token_ids: Sequence[int] = ()
) -> None:
    """Write weights, or adapters for `base`.  Collective of the role.  Raises CheckpointError on the writing rank."""
    chunks = as_chunks(model)
    first = chunks[0]
    groups = first.groups
    with tempfile.TemporaryDirectory() as folder:
        scored = first.head == "scalar"
        ids = special_ids(tokenizer, stop_token_ids, scored=scored)
        note = write_tokenizer(Path(folder), tokenizer, ids, first.shape.family, scored=scored, source=base)
        if note is not None and groups.output_rank == dist.get_rank():
            print(note, file=sys.stderr, flush=True)
        files = sorted(Path(folder).iterdir())
        try:
            export_weights(chunks, directory, settings=ids, base=base, extra_files=files)
        except OSError as error:
            raise CheckpointError(
                f"{directory}: the weights could not be written ({error.strerror or error}); {megabytes(free_bytes(directory))} "
                "are free there; free some, or move the run to a larger disk, and write them again: a run with checkpoints "
                "continues from its last one with --resume"
            ) from error


VISIBLE_WITHIN_S = 60.0  # network file systems show a new file late


def prepare_run_directory(
    config: TrainConfig | SupervisedConfig, world: World, state: Mapping[str, Any] | None, quarantine: Quarantine, *, owner: bool
) -> None:
    """Let `owner` create the run directory, or cut it to a checkpoint's `state`.  Raises ConfigError on a host that lacks it."""
    run = RunDirectory(config.run_dir)
    if owner:
        if state is None:
            run.prepare()
        else:
            run.reopen(state["done"], state["saved_at"])
        dump_config(config, run.config)
        if quarantine:
            quarantine.write(run.quarantine)
    if config.logging.console != "off" and world.rank == 0:
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
