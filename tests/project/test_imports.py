"""Third-party imports of each package, and what imports without the heavy ones.

Layers among our own packages are contracts of import-linter (pyproject.toml, `make check`).
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(link.name for link in (ROOT / "rolecall").iterdir() if link.is_dir() and link.name != "__pycache__")

THEIRS_ALLOWED = {
    "rolecall.core": {"httpx", "pydantic", "sqlalchemy", "yaml"},
    "rolecall.formats": set(),
    "rolecall.detector": {"numba", "numpy", "polars", "pydantic", "safetensors", "sklearn", "torch"},
    "rolecall.agent": {
        "anyio",
        "bcrypt",
        "grpc",
        "prometheus_client",
        "py_spy",
        "pydantic",
        "pynvml",
        "starlette",
        "uvicorn",
    },
    "rolecall.dashboards.grafana": {"grafana_client", "grafana_foundation_sdk", "niquests", "yaml"},
}
"""Package -> third-party packages it may import at all."""

READERS = (
    "rolecall.reports.report",
    "rolecall.reports.html",
    "rolecall.views.incidents",
    "rolecall.terminal.run",
    "rolecall.views.audit",
)
"""Modules that read a finished or running run: they must work on a machine without torch, Ray and vLLM."""
HEAVY = ("torch", "ray", "vllm", "transformers")


def _modules() -> dict[str, Path]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / "rolecall" / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES = _modules()


def _imports(module: str) -> Iterator[str]:
    """Full names that `module` imports: `from a.b import c` gives `a.b.c` where that is a module of ours, else
    `a.b`."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", THEIRS_ALLOWED)
def test_a_package_imports_only_what_it_may_of_others(package: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if _inside(module, package)
        for name in _imports(module)
        if (top := name.split(".")[0]) != "rolecall"
        and top not in sys.stdlib_module_names
        and top not in THEIRS_ALLOWED[package]
    ]
    assert not wrong


def test_the_walk_sees_the_tree() -> None:
    # Without this, a wrong folder name would make every test above pass on nothing.
    assert {"rolecall.core.journal.journal", "rolecall.core.ids", "rolecall.agent"} <= set(MODULES)
    assert "rolecall.core.journal.store" in set(_imports("rolecall.core.journal.journal"))


def _import_without(modules: list[str], forbidden: tuple[str, ...]) -> None:
    """Imports `modules` in a fresh interpreter in which each of `forbidden` is not to be had."""
    code = (
        "import importlib, sys\n"
        f"for name in {forbidden!r}: sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_agent_works_without_torch_ray_vllm() -> None:
    agent = [m for m in MODULES if _inside(m, "rolecall.agent") and not m.endswith("__main__")]
    _import_without(agent, (*HEAVY, "numpy", "fastapi", "flask", "aiohttp"))


def test_the_reporter_needs_only_the_standard_library() -> None:
    if "rolecall.agent.reporter.reporter" not in MODULES:
        pytest.skip("no reporter in this tree")
    others = ("pydantic", "sqlalchemy", "yaml", "rich", "typer", "numpy", "psutil", "prometheus_client", "pynvml")
    _import_without(["rolecall.agent.reporter.reporter"], (*HEAVY, *others))


def test_detector_and_recovery_work_without_torch_ray_vllm() -> None:
    both = [m for m in MODULES if _inside(m, "rolecall.detector") or _inside(m, "rolecall.recovery")]
    _import_without([m for m in both if not m.endswith("__main__")], HEAVY)


def test_what_reads_a_run_works_without_torch_ray_vllm() -> None:
    _import_without([m for m in READERS if m in MODULES], (*HEAVY, "numpy"))
