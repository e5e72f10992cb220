"""The architecture, held by reading the source: who imports whom, what stays free of torch, and how big things grow."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "oppo_megatron"
SHARED = {"errors", "plugins", "nesting", "chunks", "records", "columns", "cores", "clock", "processes", "token_text", "uniforms"}
"""Files of the package itself, which every room may use."""
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "modeldir": {"config"},
    "rundir": {"config"},
    "layout": {"config", "modeldir"},
    "preflight": {"config", "modeldir", "rundir", "layout"},
    "overcommit": set(),
    "control": {"config"},
    "algorithms": {"config"},
    "schedule": {"config", "modeldir", "layout"},
    "rewards": {"config"},
    "data": {"config", "modeldir", "preflight"},
    "cluster": {"config", "rundir"},
    "mcore": {"config", "modeldir", "rundir", "layout", "schedule", "cluster"},
    "engine": {"config", "layout", "schedule", "cluster", "mcore"},
    "train": {"config", "modeldir", "rundir", "layout", "overcommit", "control", "algorithms", "schedule"}
    | {"rewards", "data", "cluster", "mcore", "engine", "policy", "evaluation"},
    "policy": {"config", "modeldir", "rundir", "layout", "schedule", "data", "cluster", "mcore", "engine"},
    "serving": {"config", "modeldir", "layout", "rewards", "data", "cluster", "mcore"},
    "evaluation": {"config", "rundir", "control", "rewards", "data", "cluster", "policy", "serving"},
    "integrations": {"config", "modeldir", "rundir", "layout", "control", "rewards", "mcore"},
    "report": {"rundir"},
    "sim": {"config", "modeldir", "rundir", "layout", "overcommit", "control", "schedule"},
    "bench": {"config", "rundir", "layout", "preflight", "schedule", "data", "cluster", "mcore", "engine"}
    | {"integrations", "report"},
    "cli": {"config", "modeldir", "rundir", "layout", "preflight", "schedule", "data", "cluster", "train", "policy"}
    | {"serving", "evaluation", "integrations", "report", "sim", "bench"},
}
TORCH_FREE = SHARED | {
    "config", "modeldir", "rundir", "layout", "preflight", "overcommit", "control", "schedule", "report", "sim",
}  # fmt: skip
LONG_FILE, LONG_FUNCTION, LONG_CONFIG = 400, 60, 60


@dataclass(frozen=True)
class Import:
    """`module` as imported at `line` of `source`; `eager` where importing `source` runs it."""

    source: Path
    line: int
    module: str
    eager: bool

    def __str__(self) -> str:
        return f"{self.source.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(source: Path) -> Iterator[Import]:
    """Every import of a file, those inside functions and under TYPE_CHECKING included (as not eager)."""

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(source, child.lineno, alias.name, eager)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = module_name(source).split(".")
                    keep = len(package) - child.level + (source.name == "__init__.py")
                    base = ".".join([*package[:keep], *([base] if base else [])])
                for alias in child.names:
                    yield Import(source, child.lineno, f"{base}.{alias.name}", eager)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from visit(child, False)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(child, False)
            else:
                yield from visit(child, eager)

    yield from visit(ast.parse(source.read_text(encoding="utf-8")), True)


def module_name(source: Path) -> str:
    parts = source.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """`oppo_megatron.data.rows` -> `data`; None for other packages and the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in SHARED | ALLOWED.keys() else None


def is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))
IMPORTS = [imported for source in SOURCES for imported in imports_of(source)]


def test_every_file_belongs_to_a_layer_imports_what_the_table_allows_and_every_arrow_is_used() -> None:
    wrong = []
    for imported in IMPORTS:
        here, there = layer_of(module_name(imported.source)), layer_of(imported.module)
        if here is not None and there is not None and here != there and there not in ALLOWED.get(here, set()) | SHARED:
            wrong.append(str(imported))
    assert not wrong, "imports against the layers:\n" + "\n".join(wrong)
    stray = [source for source in SOURCES if layer_of(module_name(source)) is None and source.parent.name != PACKAGE]
    assert not stray, f"files of no known layer: {stray}"
    used = {(layer_of(module_name(imported.source)), layer_of(imported.module)) for imported in IMPORTS}
    unused = [f"{here} > {there}" for here, rooms in ALLOWED.items() for there in rooms if (here, there) not in used]
    assert not unused, f"arrows that no import follows: {unused}"
    TopologicalSorter(ALLOWED).prepare()  # the table itself has no circle


HEAVY = [
    ("the pure half", TORCH_FREE, ("torch", "megatron", "transformers", "tensorflow", "jax"), False),
    ("all but mcore", {None, *SHARED, *ALLOWED} - {"mcore"}, ("megatron",), False),
    ("algorithms", {"algorithms"}, ("torch.distributed",), False),
    ("data and rewards", {"data", "rewards"}, ("torch",), True),
    ("cli", {"cli"}, ("torch", "megatron", "transformers", "pydantic", "omegaconf", "numpy", "matplotlib"), True),
]
"""Libraries that rooms do not import, or not when they are imported themselves but in a handler."""


@pytest.mark.parametrize(("name", "rooms", "libraries", "eager"), HEAVY, ids=[name for name, *_ in HEAVY])
def test_a_room_stays_free_of_heavy_libraries(name: str, rooms: set[str | None], libraries: tuple[str, ...], eager: bool) -> None:
    found = [i for i in IMPORTS if layer_of(module_name(i.source)) in rooms and any(is_of(i.module, each) for each in libraries)]
    wrong = [str(i) for i in found if i.eager or not eager]
    assert not wrong, f"{libraries} in {name}:\n" + "\n".join(wrong)


def test_algorithms_do_not_name_process_groups() -> None:
    for source in (ROOT / PACKAGE / "algorithms").rglob("*.py"):
        assert not re.search(r"\btorch\.distributed\b", source.read_text(encoding="utf-8")), source


def children_graph(room: str) -> dict[str, set[str]]:
    """The children of a package (files or sub-packages) that each of them imports, under TYPE_CHECKING and locally included."""
    names = {module_name(source) for source in SOURCES}

    def child(module: str) -> str | None:
        return module.removeprefix(room + ".").partition(".")[0] if module.startswith(room + ".") else None

    graph: dict[str, set[str]] = {}
    for imported in IMPORTS:
        target = imported.module if imported.module in names else imported.module.rpartition(".")[0]
        here, there = child(module_name(imported.source)), child(target)
        if here is not None and there is not None and here != there:
            graph.setdefault(here, set()).add(there)
    return graph


@pytest.mark.parametrize("room", [module_name(source) for source in SOURCES if source.name == "__init__.py"])
def test_children_of_a_room_import_each_other_without_circles(room: str) -> None:
    try:
        TopologicalSorter(children_graph(room)).prepare()
    except CycleError as error:
        pytest.fail(f"circle in {room}: {' -> '.join(error.args[1])}")


SHIPPED = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if "runs" not in path.parts)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_config_parses_and_is_short(path: Path) -> None:
    from oppo_megatron.cli.load import guess_kind
    from oppo_megatron.config.describe import SUPERVISED
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.config.serve import ServeConfig
    from oppo_megatron.sim.clusters.reading import ClusterConfig
    from oppo_megatron.sim.flow.dataflow import Dataflow

    kinds, others = {"train": TrainConfig, **SUPERVISED}, {"scorer": ServeConfig, "cluster": ClusterConfig, "flow": Dataflow}
    word = path.stem.rpartition("-")[2]
    load_config(others[word] if word in others else kinds[guess_kind(path)], path)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONG_CONFIG


def test_help_answers_within_a_second_without_torch() -> None:
    code = """if True:
        import resource, sys
        from oppo_megatron.cli.main import main
        try: main(['--help'])
        except SystemExit as end: assert end.code == 0
        heavy = {'torch', 'megatron', 'transformers', 'pydantic', 'omegaconf', 'numpy'} & set(sys.modules)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = used.ru_utime + used.ru_stime  # of the processor: a busy machine lets each wait for longer
        assert not heavy and seconds < 1.0, f'{heavy}, {seconds} s; it must answer within 1 s'
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def tracked_text_files() -> Iterator[tuple[Path, str]]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout: nothing says which files are tracked; run this in a clone")
    for name in listing.stdout.splitlines():
        path = ROOT / name
        if path.is_file():
            yield path, path.read_bytes().decode("utf-8", errors="replace")


def test_no_machine_path_and_no_package_index_in_the_repository() -> None:
    indices = r"--(?:extra-)?index[-]url|files[.]pythonhosted|pypi[.]org/simple"
    forbidden = re.compile(rf"(?<![\w.])/(?:root|work|home/\w+)/[\w.]|{indices}")
    lines = ((path, *numbered) for path, text in tracked_text_files() for numbered in enumerate(text.splitlines(), start=1))
    wrong = [f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}" for path, number, line in lines if forbidden.search(line)]
    assert not wrong, "paths of one machine, or a package index:\n" + "\n".join(wrong)


def test_files_and_functions_are_short() -> None:
    lines = []
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        name = str(source.relative_to(ROOT))
        if (length := len(text.splitlines())) > LONG_FILE:
            lines.append(f"{name}: {length} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > LONG_FUNCTION:
                    lines.append(f"{name}:{node.lineno}: {node.name}() has {length} lines")
    assert not lines, f"files > {LONG_FILE} lines, functions > {LONG_FUNCTION}: {'; '.join(lines)}"
