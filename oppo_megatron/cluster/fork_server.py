"""Imported first by the server that ranks are forked from: it ends with the process that started it."""

from oppo_megatron.processes import end_with_parent

end_with_parent()
