"""Following a page: its commands are found, Ctrl-C is pressed where it stands, and what is missing is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.transcripts import follow, masked, steps, user_environment

PAGE = """
```console
$ cat > a.txt <<'END'
$HOME
END
$ cat a.txt
...
text
```
Not a command: `$ ls`.
"""
WAITS = "trap 'echo saved; exit 75' INT; echo step 1; while true; do sleep 0.05; done"


def test_commands_and_what_is_shown_below_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert list(steps(page)) == [("cat > a.txt <<'END'\n$HOME\nEND", []), ("cat a.txt", ["text"])]


def test_a_line_is_the_same_but_for_numbers_and_times() -> None:
    one = masked("ppo 13/30  ETA 36s  reward -0.420  tok/s 1.2k  checkpoint step-000013-clock-00001148")
    assert one == masked("ppo 5/30  reward +0.1  tok/s 900  checkpoint step-000005")
    assert one != masked("ppo 5/30  reward +0.1  tok/s 900  checkpoint steps-000005")


def test_ctrl_c_is_pressed_when_the_line_above_it_has_come(tmp_path: Path) -> None:
    follow(WAITS, ["step 7", "^C", "saved"], tmp_path, user_environment())


@pytest.mark.parametrize(("command", "shown"), [
    ("echo a; echo b", ["b", "a"]), ("echo a; exit 3", ["a"]), (WAITS, ["step 1", "^C", "lost"]),
])  # fmt: skip
def test_what_a_page_says_and_a_command_does_not_is_an_error(command: str, shown: list[str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="does not show, in this order: |ended with 3"):
        follow(command, shown, tmp_path, user_environment())
