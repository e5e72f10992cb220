"""Count the code base: `python tools/size.py` prints lines, words, settings, commands and small files."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "oppo_megatron"
GENERATED = {"configuration.md", "mistakes.md"}
SMALL = 80
MODULE = re.compile(rf"{PACKAGE}(\.\w+)+(:\w+)?$")


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imports(path: Path) -> set[Path]:
    """Files of the package that one of its files imports anywhere, inside functions too, or names in a string to be imported."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.match(node.value):
            names = [node.value.split(":")[0]]
        for name in names:
            if name.startswith(f"{PACKAGE}."):
                place = ROOT / name.replace(".", "/")
                found |= {file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()}
    return found


def reachable(start: Path) -> set[Path]:
    """Files that `start` imports, directly or through others."""
    seen: set[Path] = set()
    waiting = {start}
    while waiting:
        path = waiting.pop()
        seen.add(path)
        waiting |= imports(path) - seen
    return seen


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from oppo_megatron.cli.main import COMMANDS as commands
    from tests.architecture.test_promises import optional_settings

    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED] + [ROOT / "README.md"]
    table = {
        f"lines of {PACKAGE}/": sum(map(lines, files)),
        "lines reachable by imports from `oppo train`": sum(map(lines, reachable(ROOT / PACKAGE / "cli" / "run.py"))),
        "lines of tests": sum(map(lines, (ROOT / "tests").rglob("*.py"))),
        "words of docs and README": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "settings of `oppo train`": len(optional_settings("train")),
        "commands of `oppo`": len(commands),
        f"files under {SMALL} lines": sum(lines(file) < SMALL for file in files),
    }
    for name, count in table.items():
        print(f"{count:8,d}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
