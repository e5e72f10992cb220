"""Imported first by the fork server, which ends with the process that started it."""

from oppo_megatron.processes import end_with_parent

end_with_parent()
