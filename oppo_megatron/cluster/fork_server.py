"""Imported first by the process that ranks are forked from: from then on it ends with the process that started it."""

from oppo_megatron.processes import end_with_parent

end_with_parent()
