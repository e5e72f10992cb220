"""Imported first by the fork server, which ends with the process that started it, also if that one has ended already."""

import os

from oppo_megatron.processes import end_with_parent

LAUNCHER = "OPPO_LAUNCHER"
"""Environment variable: process id of who started the fork server."""

if LAUNCHER in os.environ:
    end_with_parent(int(os.environ.pop(LAUNCHER)))
