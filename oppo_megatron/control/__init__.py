"""Controllers: pure state machines that take a step's measurements and give the next value with its reason.

They have no clock, no random numbers and no I/O of their own, so that one rank can decide, all ranks can receive the
decision and a simulation can use the very same objects.
"""

from oppo_megatron.records import Decision

__all__ = ["Decision"]
