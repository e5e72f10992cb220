"""The process of `isolation.IsolatedFunction`: python -m oppo_megatron.rewards.isolated_child READ_FD WRITE_FD"""

from __future__ import annotations

import io
import json
import numbers
import os
import resource
import sys
from typing import Any

from oppo_megatron.errors import ConfigError
from oppo_megatron.processes import allow_processor_time, end_with_parent, limit_resource
from oppo_megatron.rewards.entry_point import load_entry_point
from oppo_megatron.rewards.user_code import said_of

MAX_ANSWER_BYTES = 1 << 16
SHOWN_CHARACTERS = 1000


def main(reads: int, writes: int) -> None:
    """Load the function that the first line names, then answer a line with a line until there are no more."""
    for descriptor in (reads, writes):
        os.set_inheritable(descriptor, False)
    with os.fdopen(reads, "rb") as calls, os.fdopen(writes, "wb") as answers:
        task, own = json.loads(calls.readline()), os.getpid()
        end_with_parent(task["parent"])  # nobody else would end a function that never returns
        limit_resource(resource.RLIMIT_CORE, 0)
        limit_resource(resource.RLIMIT_AS, task["memory_bytes"])
        try:
            function = load_entry_point(task["entry_point"], task["options"])
        except ConfigError as error:
            _answer(answers, task, {"error": error.problems[0]})
            return
        _answer(answers, task, {"ready": True, "settles": hasattr(function, "settled")})
        for line in calls:
            allow_processor_time(task["cpu_s"])
            call = json.loads(line)
            answer = _call(function, call, task["options"])
            if os.getpid() != own:  # a copy of this process, which the function has made and let return
                os._exit(0)
            _answer(answers, call, answer)


def _call(function: Any, call: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    try:
        asked = function.settled if "settled" in call else function
        value = asked(call["prompt"], call["response"], call["fields"], **options)
        if value is None and "settled" in call:
            return {"value": None}
        if not isinstance(value, numbers.Real):
            return {"error": f"it gave {str(value)[:SHOWN_CHARACTERS]} ({type(value).__name__}), not a number"}
        return {"value": float(value)}
    except Exception as error:  # a user's function may raise anything; all of it is an answer
        return {"error": said_of(error)}


def _answer(answers: io.BufferedWriter, call: dict[str, Any], answer: dict[str, Any]) -> None:
    answers.write(json.dumps({**answer, "call": call["call"]}).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
