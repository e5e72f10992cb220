"""Lets torch's elastic agent start the ranks of one host without opening a port to other hosts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from oppo_megatron.cluster.loopback import BACKEND, LOOPBACK, LoopbackRendezvous, loopback_store
from oppo_megatron.cluster.rendezvous import MeetingPoint

TIMEOUT = timedelta(minutes=10)  # for the agent's own messages; the ranks have deadlines of their own


@dataclass(frozen=True)
class LocalMeeting:
    """Where the ranks that this process starts meet: in a store on a port that is free."""

    run_id: str
    store: dist.TCPStore

    @classmethod
    def open(cls, run_id: str) -> LocalMeeting:
        return cls(run_id, loopback_store(0, TIMEOUT))

    def settings(self) -> dict[str, Any]:
        """For torch's LaunchConfig."""
        rendezvous_handler_registry.register(BACKEND, _create)
        return {"run_id": self.run_id, "rdzv_backend": BACKEND, "rdzv_configs": {"store": self.store}}

    def point(self, num_ranks: int) -> MeetingPoint:
        """As the ranks see it, in the agent's first and only attempt."""
        name = f"oppo/{self.run_id}/0"
        return MeetingPoint(
            LOOPBACK, self.store.port, num_ranks, name, opens=False, opener="the process that started the ranks"
        )


def _create(parameters: RendezvousParameters) -> LoopbackRendezvous:
    store = parameters.config["store"]
    assert isinstance(store, dist.TCPStore)
    return LoopbackRendezvous(parameters.run_id, store, TIMEOUT)
