"""The only room that imports megatron-core."""

import warnings

from oppo_megatron.mcore.quick_import import import_megatron

# megatron-core says in every process, as it is imported, which optional packages are absent; `oppo validate` says it once.
_remarks = [".*Apex", ".*Transformer Engine", "full scope is deprecated", "If you are using transformer_engine"]
# Its distributed optimizer asks every parameter's shard for a gradient of its own.
_remarks.append(r"The \.grad attribute of a Tensor that is not a leaf")
for _message in _remarks:
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
# megatron-core calls torch functions that a later torch will replace.
for _message in ("`load_state_dict` is deprecated", "Please use DTensor instead", r"`torch\.distributed\.\w+` is deprecated"):
    warnings.filterwarnings("ignore", message=_message, category=FutureWarning)
del _message, _remarks
import_megatron()
