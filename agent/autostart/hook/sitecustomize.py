"""Runs at the start of every Python process of a job that was started with `rolecall exec`.

Until torch's optimizers are imported it does nothing but wait for that import; only then rolecall's reporter is loaded,
from the folder in which this file lies, and told about torch (`training.py`). Whatever fails, the job goes on without.
A `sitecustomize` of the job's own environment, which this one hides, runs as before. Standard library only; older
versions of Python can read it, and do nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
AWAITED = "torch.optim.optimizer"
PYTHON_MIN = (3, 11)


def _load(name: str, origin: str, folders: list[str] | None = None) -> None:
    spec = importlib.util.spec_from_file_location(name, origin, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None, "a file that ends with .py has both"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _run_hidden() -> None:
    others = [p for p in sys.path if os.path.abspath(p) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.origin:
        _load("sitecustomize", spec.origin)


class _AwaitedImport:
    """Finds nothing itself: lets the import of torch's optimizers go on, and attaches once it is over."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _attach(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _attach(optimizers: ModuleType) -> None:
    try:
        if "rolecall" not in sys.modules:
            _load("rolecall", os.path.join(PACKAGE, "__init__.py"), [PACKAGE])
        from rolecall.agent.autostart.training import attach

        attach(optimizers)
    except Exception as e:  # noqa: BLE001 the job goes on without
        sys.stderr.write(f"rolecall does not watch this process: {type(e).__name__}: {e}\n")


if os.environ.get("ROLECALL_AUTOSTART") == "1" and sys.version_info >= PYTHON_MIN:
    sys.meta_path.insert(0, _AwaitedImport())
_run_hidden()
