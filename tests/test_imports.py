"""The packages of `runner/` import in one direction only, and no module has to wait for another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Each package may import from itself and from those below it. Those of one line do not know each other.
TOOLS = (
    ("tools.evidence",),
    ("tools.evaluate", "tools.plan", "tools.publish", "tools.scale", "tools.verify"),
    ("tools.sweep",),
    ("tools.compare",),
)
CORE = (
    ("run",),
    ("track",),
    ("speed",),
    ("measure",),
    ("launch",),
    ("train",),
    ("exact", "sync"),
    ("cost",),
    ("plan",),
    ("backends",),
    ("data",),
    ("kernels",),
    ("folder",),
    ("config",),
    ("log",),
    ("errors",),
)
#: Modules that only run a tool, or name what users import.
ENTRIES = ("compare", "evaluate", "evidence", "predict", "publish", "scale", "verify")
LAYERS = ((*ENTRIES, "api"), ("cli", "audit"), ("tools.audit",), *TOOLS, *CORE)
LEVEL = {name: len(LAYERS) - number for number, names in enumerate(LAYERS) for name in names}
#: Packages below one that it does not know all the same.
STRANGERS = {"sync": ("data", "kernels")}
#: Imports inside a function that need no comment of their own: what takes seconds to import, or is optional.
SLOW_OR_OPTIONAL = (
    *(
        "datasets",
        "huggingface_hub",
        "hydra",
        "jinja2",
        "matplotlib",
        "mlflow",
        "omegaconf",
        "pandas",
        "pyarrow",
        "scipy",
    ),
    *("sklearn", "safetensors", "tensorboard", "tokenizers", "torch_xla", "torchmetrics", "transformers", "wandb"),
)


def modules() -> dict[str, Path]:
    files = [*ROOT.glob("runner/**/*.py"), *ROOT.glob("recipes/**/*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


MODULES = modules()


def imported(name: str, node: ast.AST) -> Iterator[str]:
    """The modules of this project that an import statement loads."""
    if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in MODULES else node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)


def imports(name: str) -> set[str]:
    """Everything that a module imports, in functions and for type checkers, too."""
    tree = ast.parse(MODULES[name].read_text())
    return {found for node in ast.walk(tree) for found in imported(name, node) if found in MODULES} - {name}


def package_of(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[:1] == ["tools"] else "".join(parts[:1])


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.startswith("runner.")))
def test_packages_import_towards_the_bottom(name: str) -> None:
    if name.endswith("__main__"):  # a command line starts at the top, wherever its package is
        return
    own = package_of(name)
    for other in imports(name):
        assert not other.startswith("recipes"), f"{name} imports {other}: the runner knows no recipe by name"
        package = package_of(other)
        if package and package != own:
            assert LEVEL[package] < LEVEL[own], f"{name} imports {other}, which is not below it"
            assert package not in STRANGERS.get(own, ()), f"{name} imports {other}, which it does not need to know"


def test_no_import_circle() -> None:
    graph = {name: imports(name) for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "import circle: " + " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_an_import_inside_a_function_says_why(name: str) -> None:
    """By a comment in its line or above its block, unless the library is known to be slow or optional."""
    text = MODULES[name].read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            top = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
            known = top.split(".")[0] in SLOW_OR_OPTIONAL
            first = node.lineno - 1
            while lines[first - 1].strip().startswith(("from ", "import ")):
                first -= 1
            why = "#" in lines[node.lineno - 1] or lines[first - 1].strip().startswith("#")
            assert known or why, f"{MODULES[name].relative_to(ROOT)}:{node.lineno} imports {top} and does not say why"


def test_top_level_of_the_package() -> None:
    files = {path.stem for path in (ROOT / "runner").glob("*.py")}
    assert files == {"__init__", "__main__", "api", "audit", "cli", "errors", "log", *ENTRIES}
    folders = {*(ROOT / "runner").glob("*/__init__.py"), *(ROOT / "runner" / "tools").glob("*/__init__.py")}
    names = {".".join(path.parent.relative_to(ROOT / "runner").parts) for path in folders}
    assert names == {name for layer in (*TOOLS, *CORE) for name in layer} - {"errors", "log"} | {"tools", "tools.audit"}
