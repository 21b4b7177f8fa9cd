"""Runs at the start of every Python process of a job that was started with `rolecall exec`.

Until torch's optimizers are imported it does nothing but wait for that import. Only then rolecall's reporter is loaded,
from the folder in which this file lies unless the job has its own, and told about torch (`training.py`). Whatever
fails, the job goes on without. A `sitecustomize` of the job's own environment, which this one hides, runs as before.
Standard library only, no annotations and no f-strings: old versions of Python, also 2.7, read it and do nothing.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
AWAITED = "torch.optim.optimizer"
PYTHON_MIN = (3, 11)
CHAIN_PYTHON_MIN = (3, 5)


def _load(spec):
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # no half-executed module stays, whatever ended it; it goes on to the caller
        sys.modules.pop(spec.name, None)
        raise


def _run_hidden(visited):
    """Runs the next `sitecustomize` of the path. `visited`: folders whose one has run or runs now; others chain, too,
    and come back here."""
    folders = [os.path.abspath(p) for p in sys.path]
    if HERE in folders:  # those before it have run, or Python would have taken them
        folders = folders[folders.index(HERE) + 1 :]
    for folder in folders:
        if folder not in visited:
            spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [folder])
            if spec is not None and spec.origin:
                visited.append(folder)
                _load(spec)
                return


class _AwaitedImport:
    """Finds nothing itself: lets the import of torch's optimizers go on, and attaches once it is over."""

    _searching = False

    def find_spec(self, name, path=None, target=None):
        if name != AWAITED or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _attach(module)

            spec.loader.exec_module = exec_module
            return spec
        except Exception:  # noqa: BLE001 no such module, or a loader of another kind: the import goes on without
            return None
        finally:
            self._searching = False


def _attach(optimizers):
    before = set(sys.modules)
    try:
        own = importlib.util.find_spec("rolecall")
        # A folder that merely has this name, as a clone beside the job's script, is no package of the job.
        if "rolecall" not in before and (own is None or own.origin is None):
            origin = os.path.join(PACKAGE, "__init__.py")
            _load(importlib.util.spec_from_file_location("rolecall", origin, submodule_search_locations=[PACKAGE]))
        elif not any(
            os.path.exists(os.path.join(folder, "agent", "autostart", "training.py"))
            for folder in own.submodule_search_locations or ()
        ):
            return  # another package, or an older rolecall
        from rolecall.agent.autostart.training import attach

        attach(optimizers)
    except Exception as e:  # noqa: BLE001 the job goes on without
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "rolecall":
                del sys.modules[name]
        sys.stderr.write("rolecall does not watch this process: " + type(e).__name__ + ": " + str(e) + "\n")


if sys.version_info >= CHAIN_PYTHON_MIN:
    import importlib.machinery
    import importlib.util

    if not hasattr(sys, "_rolecall_hooks"):
        sys._rolecall_hooks = []
        if os.environ.get("ROLECALL_AUTOSTART") == "1" and sys.version_info >= PYTHON_MIN:
            sys.meta_path.insert(0, _AwaitedImport())
    sys._rolecall_hooks.append(HERE)
    _run_hidden(sys._rolecall_hooks)
