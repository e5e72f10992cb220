"""The only room that imports megatron-core."""

import warnings

# megatron-core says in every process, as it is imported, which optional packages are absent; `oppo doctor` says it once.
for _message in (".*Apex", ".*Transformer Engine", "full scope is deprecated"):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)
del _message
