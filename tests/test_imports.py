"""Imports point one way: everything may import core, siblings do not know each other, and nothing imports dashboards.

Read from the syntax tree, so that an import inside a function counts as well.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDER_OF = {"rolecall": "rolecall", **SETUPTOOLS["package-dir"]}

OURS_ALLOWED = {
    "rolecall.core": ("rolecall.core",),
    "rolecall.agent": ("rolecall.core", "rolecall.agent"),
    "rolecall.detector": ("rolecall.core", "rolecall.detector"),
    "rolecall.recovery": ("rolecall.core", "rolecall.recovery"),
    "rolecall.rl_runtime": ("rolecall.core", "rolecall.rl_runtime", "rolecall.agent.reporter"),
    "rolecall.dashboards.grafana": (
        "rolecall.core",
        "rolecall.dashboards.grafana",
        "rolecall.agent.dcgm",
        "rolecall.text",
    ),
}
"""Package -> what of rolecall it may import. `rolecall.cli` and the modules beside it compose, and may import all."""

THEIRS_ALLOWED = {
    "rolecall.core": {"pydantic", "sqlalchemy", "yaml"},
    "rolecall.detector": {"numpy", "polars", "safetensors", "sklearn", "torch"},
    "rolecall.agent": {"bcrypt", "py_spy", "pydantic", "pynvml"},
    "rolecall.dashboards.grafana": {"grafana_client", "grafana_foundation_sdk", "niquests", "yaml"},
}
"""Package -> third-party packages it may import at all."""

READERS = ("rolecall.report", "rolecall.report_html", "rolecall.timeline", "rolecall.display", "rolecall.auditing")
"""Modules that read a finished or running run: they must work on a machine without torch, Ray and vLLM."""
HEAVY = ("torch", "ray", "vllm", "transformers")


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDER_OF.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _imports(module: str) -> Iterator[str]:
    """Full names that `module` imports: `from a.b import c` gives `a.b.c` where that is a module of ours, else `a.b`."""
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


@pytest.mark.parametrize("package", OURS_ALLOWED)
def test_a_package_imports_only_what_it_may_of_ours(package: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if _inside(module, package)
        for name in _imports(module)
        if _inside(name, "rolecall")
        and name != "rolecall"
        and not any(_inside(name, ok) for ok in OURS_ALLOWED[package])
    ]
    assert not wrong


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


def test_nothing_imports_dashboards_but_the_composition_root() -> None:
    wrong = [
        module
        for module in MODULES
        if not _inside(module, "rolecall.dashboards")
        and module
        not in (
            "rolecall.cli",
            "rolecall.demo",
            "rolecall.people_cli",
            "rolecall.grafana_cli",
            "rolecall.grafana_push_cli",
            "rolecall.dashboard_cli",
            "rolecall.dashboard_beside",
        )
        if any(_inside(name, "rolecall.dashboards") for name in _imports(module))
    ]
    assert not wrong


def test_the_walk_sees_the_tree() -> None:
    # Without this, a wrong folder name would make every test above pass on nothing.
    assert {"rolecall.core.journal", "rolecall.core.ids", "rolecall.agent"} <= set(MODULES)
    assert "rolecall.core.store" in set(_imports("rolecall.core.journal"))


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
    if "rolecall.agent.reporter" not in MODULES:
        pytest.skip("no reporter in this tree")
    others = ("pydantic", "sqlalchemy", "yaml", "rich", "typer", "numpy", "psutil", "prometheus_client", "pynvml")
    _import_without(["rolecall.agent.reporter"], (*HEAVY, *others))


def test_detector_and_recovery_work_without_torch_ray_vllm() -> None:
    both = [m for m in MODULES if _inside(m, "rolecall.detector") or _inside(m, "rolecall.recovery")]
    _import_without([m for m in both if not m.endswith("__main__")], HEAVY)


def test_what_reads_a_run_works_without_torch_ray_vllm() -> None:
    _import_without([m for m in READERS if m in MODULES], (*HEAVY, "numpy"))
