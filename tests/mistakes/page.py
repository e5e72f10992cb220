"""Print the page of every mistake with the message that it gets; the site shows it (docs/tools/site_hooks.py)."""

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from oppo_megatron.cli.main import main
from tests.mistakes.given import COMMANDS, DATA, ENVIRONMENT, FUNCTIONS, RUNS, SETTINGS, TOKENIZERS, WEIGHTS, YAML
from tests.mistakes.policies import ENDS, EVAL, GENERATE, RESUME, TAKEN
from tests.mistakes.project import Mistake, build, inside

GROUPS = {
    "Settings": SETTINGS, "Configuration files": YAML, "Weights": WEIGHTS, "Tokenizers": TOKENIZERS, "Data": DATA,
    "Folders of runs": RUNS, "Continuing a run": RESUME, "Where responses and runs end": ENDS, "Asking a policy": GENERATE,
    "Judging policies": EVAL, "Weights, reports and jobs that are written": TAKEN, "Commands": COMMANDS,
    "Reward functions": FUNCTIONS, "Launchers and machines": ENVIRONMENT,
}  # fmt: skip
MISTAKES = tuple(mistake for group in GROUPS.values() for mistake in group)
HEAD = """\
# Mistakes and their remedies

A test makes each of these mistakes, checks that no file is lost or changed and that no traceback is shown, then follows the
remedy and checks that it works.  `python -m tests.mistakes.page` writes this page from the commands' messages.
"""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LONGEST = 420


def typed(arguments: Sequence[str]) -> int:
    """Exit code of `oppo ARGUMENTS`, in this process; modules of the project are forgotten, as a new process has none."""
    sys.modules.pop("my_rewards", None)
    try:
        return main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)


def row(mistake: Mistake, answer: str, folder: Path) -> str:
    """A line of the table: what was typed, and the words of the answer, with nothing of this machine or this moment."""
    command = shlex.join(["oppo", *mistake.typed])
    variables = "".join(f"{name}={value} " for name, value in mistake.variables.items())
    said = _plain(answer, folder)
    return f"| {mistake.name} | {_cell(f'`{variables}{command}`')} | {_cell(said)} |"


def _plain(answer: str, folder: Path) -> str:
    answer = re.sub(r"usage: .*?(?=^oppo)", "", answer.replace(f"{folder}/", ""), flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip().removeprefix("- ") for line in answer.splitlines()]
    kept = [line for line in lines if line and not re.search(r": \d+ problems:$", line) and ": starting " not in line]
    said = re.sub(r"^oppo [a-z-]+(?: \[rank \d+\])?: ", "", re.sub(r"\s+", " ", " ".join(kept)))
    return said if len(said) <= LONGEST else said[:LONGEST].rpartition(" ")[0] + " ..."


def _cell(text: str) -> str:
    """Write what Markdown would take for its own outside of code as an entity; a bar is escaped everywhere."""
    parts = text.replace("|", "\\|").split("`")
    if len(parts) % 2 == 0:  # the last quotation mark has no partner
        parts[-2:] = ["'".join(parts[-2:])]
    parts[::2] = [re.sub(r"[<>*_{}\[\]]", lambda found: f"&#{ord(found[0])};", part) for part in parts[::2]]
    return "`".join(parts)


@contextlib.contextmanager
def mistaken(mistake: Mistake, template: Path, folder: Path) -> Iterator[None]:
    shutil.copytree(template, folder)
    with inside(folder), mock.patch.dict(os.environ), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        for name in [name for name in os.environ if name in LAUNCHED or name.startswith("SLURM_")]:
            del os.environ[name]
        for edit in mistake.spoils:
            edit(folder)
        yield


def answered(mistake: Mistake) -> int:
    with mock.patch.dict(os.environ, mistake.variables):
        return typed(mistake.typed)


def _write() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        template = Path(scratch) / "template"
        template.mkdir()
        with contextlib.redirect_stdout(sys.stderr):
            build(template)
        print(HEAD)
        for number, (name, group) in enumerate(GROUPS.items()):
            print(f"## {name}\n\n| mistake | typed | message |\n|---|---|---|")
            for place, mistake in enumerate(group):
                folder, said = Path(scratch) / f"{number}-{place}" / "project", io.StringIO()
                folder.parent.mkdir()
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                    with mistaken(mistake, template, folder):
                        answered(mistake)
                print(row(mistake, said.getvalue(), folder))
            print()


if __name__ == "__main__":
    _write()
