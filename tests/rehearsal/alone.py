"""One rank of many, without the others: every other rank does as this one does."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.rehearsal.channels import Done
from tests.rehearsal.peers import Peers
from tests.rehearsal.watch import Watch


class Alone(Peers):
    """Collectives find the same call on all ranks; what comes from another rank has a type and a size, and no numbers."""

    def stand(self, watch: Watch, rank: int, size: int) -> None:
        self.join(watch, dist.HashStore(), rank, size)

    def exchange(self, group: Any, mine: Any) -> list[Any]:
        return [mine for _ in self.of(group)[1]]

    def send(self, tensor: Tensor, to: int, group: Any, *, alone: bool, tag: int = 0) -> Done:
        return self.channels.begin("messages", [tensor], [])

    def receive(self, tensor: Tensor, source: int, group: Any, *, alone: bool, tag: int = 0) -> Done:
        return self.channels.begin("messages", [], [tensor], lambda: self.put(tensor, None))
