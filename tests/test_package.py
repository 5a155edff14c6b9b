"""The package as a whole: what importing it costs, and which part may know which.

The layers are read from the source with an AST walk, so an import inside a function or under TYPE_CHECKING counts too.
"""

import ast
import json
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "treewy"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Which parts of treewy each part may import, besides itself. A new part names its place here.
CORE = {"tree", "reference", "ops", "state", "acceptance", "drafting", "generation"}
ADAPTERS = {"transformers", "vllm"}
TOP = {"bench", "cli"}
ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "tree": set(),
    "reference": {"tree"},
    "ops": {"tree", "reference"},
    "state": {"tree", "ops"},
    "acceptance": {"tree"},
    "drafting": {"tree", "acceptance"},
    "generation": CORE,
    "transformers": CORE,
    "vllm": CORE,
    "model": set(),
    "bench": CORE | ADAPTERS | {"model"},
    "cli": CORE | ADAPTERS | {"bench", "model"},
}
# What the layers below the adapters may import from outside; all else is an undeclared or a misplaced dependency.
OUTSIDE = {part: {"torch"} for part in CORE} | {"ops": {"torch", "triton", "cuda"}, "__init__": set()}
# Libraries that only their own adapter, and what sits on top of it, may import.
OWNED = {"transformers": {"transformers"} | TOP, "vllm": {"vllm"} | TOP}

MACHINE_PATH = re.compile(r"(?<![\w.:/}>*~-])/(?:home|root|Users|mnt|opt|srv|tmp|var|data|work)/\w")

EXTRA = re.compile(r"(.)treewy\[([\w-]+)\](.?)")


def part_of(source: Path) -> str:
    """The part of the package a file belongs to: its first folder, or its own name."""
    first = source.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(tree: ast.Module, source: Path) -> set[str]:
    """Every absolute dotted name that a module imports."""
    folders = ["treewy", *source.relative_to(PACKAGE).parent.parts]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = folders[: len(folders) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            # `from treewy import tree` imports treewy.tree; `from treewy.tree import x` imports treewy.tree.
            names.update(f"{base}.{alias.name}" if base == "treewy" else base for alias in node.names)
    return names


def problems(source: Path, text: str) -> list[str]:
    """What a file imports against the direction of dependencies."""
    part = part_of(source)
    if part not in ALLOWED:
        return [f"{part}: has no place in ALLOWED"]
    found = []
    for name in imports_of(ast.parse(text), source):
        root, _, rest = name.partition(".")
        if root == "treewy":
            target = rest.partition(".")[0]
            if target and not target.startswith("__") and target != part and target not in ALLOWED[part]:
                found.append(f"{part} imports treewy.{target}")
        elif root not in sys.stdlib_module_names:
            if root not in OUTSIDE.get(part, {root}):
                found.append(f"{part} imports {root}")
            if part not in OWNED.get(root, {part}):
                found.append(f"{part} imports {root}, which belongs to its adapter")
    return sorted(found)


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependencies_point_downwards(source: Path) -> None:
    assert problems(source, source.read_text()) == []


@pytest.mark.parametrize(
    ("file", "line", "problem"),
    [
        ("tree.py", "from treewy.ops import verify", "tree imports treewy.ops"),
        ("tree.py", "from . import state", "tree imports treewy.state"),
        ("ops/api.py", "from ..generation import x", "ops imports treewy.generation"),
        ("acceptance.py", "def f():\n    import treewy.drafting", "acceptance imports treewy.drafting"),
        ("transformers/cache.py", "from treewy import vllm", "transformers imports treewy.vllm"),
        ("vllm/layer.py", "from treewy.transformers.x import y", "vllm imports treewy.transformers"),
        ("state.py", "import transformers.cache_utils", "state imports transformers"),
        ("vllm/layer.py", "import transformers", "vllm imports transformers, which belongs to its adapter"),
        ("drafting.py", "import numpy as np", "drafting imports numpy"),
        ("extra.py", "", "extra: has no place in ALLOWED"),
    ],
)
def test_the_walk_sees_a_wrong_import(file: str, line: str, problem: str) -> None:
    assert problem in problems(PACKAGE / file, line)


def test_the_walk_accepts_what_is_allowed() -> None:
    ops = "import math\nimport triton\nfrom ..tree import A\nfrom . import b"
    assert problems(PACKAGE / "ops" / "api.py", ops) == []
    assert problems(PACKAGE / "cli.py", "from treewy import __version__\nimport transformers") == []


def test_every_part_of_the_tables_exists() -> None:
    parts = {part_of(source) for source in SOURCES}
    named = set(ALLOWED).union(*ALLOWED.values()) | set(OUTSIDE) | set(OWNED).union(*OWNED.values())
    assert named - parts == set()


def test_no_path_of_a_machine_in_the_package() -> None:
    for file in PACKAGE.rglob("*"):
        if file.suffix in {".py", ".md", ".json", ".toml", ".txt"}:
            assert MACHINE_PATH.findall(file.read_text()) == [], file


def test_extras_are_quoted_for_every_shell_and_exist() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    found = [match for file in SOURCES for match in EXTRA.findall(file.read_text())]
    assert len(found) >= 5
    for before, extra, after in found:
        assert (before, after) == ("'", "'"), extra
        assert extra in project["optional-dependencies"]


def fresh_import(first: str) -> dict:
    """Import treewy in a new interpreter after the statement `first`; seconds and newly loaded modules."""
    code = f"""
import json, sys, time
{first}
before = set(sys.modules)
start = time.perf_counter()
import treewy
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "added": sorted(set(sys.modules) - before)}}))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_import_loads_no_engine() -> None:
    added = {name.partition(".")[0] for name in fresh_import("")["added"]}
    assert added & {"transformers", "vllm", "triton", "typer", "rich"} == set()


def test_import_is_quick_beyond_torch() -> None:
    runs = [fresh_import("import torch") for _ in range(3)]
    assert statistics.median(run["seconds"] for run in runs) < 0.5
    outside = {name.partition(".")[0] for name in runs[0]["added"]} - sys.stdlib_module_names - {"treewy"}
    assert outside == set()
