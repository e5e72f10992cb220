"""Hosts of the ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from oppo_megatron.config.model import format_ranks


@dataclass(frozen=True)
class RankHost:
    rank: int
    host: str
    node: str | None  # the launcher's number of the machine
    device: str  # numbered among the visible devices
    threads: int
    pid: int
    gpu: str = ""  # the device's UUID

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host}"

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> RankHost:
        return cls(**json.loads(text))


def shared_gpus(hosts: Sequence[RankHost]) -> list[str]:
    """Texts as `ranks 0,4 of host a`."""
    by_gpu: dict[tuple[str, str], list[int]] = {}
    for rank in hosts:
        if rank.gpu:
            by_gpu.setdefault((rank.host, rank.gpu), []).append(rank.rank)
    return [f"ranks {format_ranks(ranks)} of host {host}" for (host, _), ranks in by_gpu.items() if len(ranks) > 1]


def describe_hosts(hosts: Sequence[RankHost]) -> list[str]:
    """Lines as `rank 0-3: host a (node 0, cpu, 4 threads each)`."""

    def kind(rank: RankHost) -> tuple[str, str, str, int]:
        device = rank.device.partition(":")[0]
        return rank.node or "", rank.host, device, rank.threads

    lines = []
    for (node, host, device, threads), members in groupby(sorted(hosts, key=lambda rank: rank.rank), key=kind):
        ranks = [rank.rank for rank in members]
        facts = [*([f"node {node}"] if node else []), device, f"{threads} thread{'s' if threads > 1 else ''}"]
        each = " each" if len(ranks) > 1 else ""
        lines.append(f"rank {format_ranks(ranks)}: host {host} ({', '.join(facts)}{each})")
    return lines


def show_hosts(hosts: Sequence[RankHost]) -> None:
    print("\n".join(describe_hosts(hosts)), file=sys.stderr, flush=True)
