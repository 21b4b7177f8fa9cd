"""Calls a function with a module of the job once it has been imported, whenever that is.

So a plugin changes modules of its framework without importing them itself, and before others take names from them. What
fails in the function is logged, and the import goes on. Standard library only.
"""

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

logger = logging.getLogger(__name__)

Act = Callable[[ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: each of `acts` (module name -> function) is called once, after the module's own import."""

    def __init__(self, acts: Mapping[str, Act]) -> None:
        self._acts = dict(acts)

    def install(self) -> None:
        """Modules that are there already get their call now, the others when they are imported."""
        for name in [name for name in self._acts if name in sys.modules]:
            _call(self._acts.pop(name), sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        act = self._acts.pop(fullname, None)
        if act is None:
            return None
        try:
            spec = importlib.util.find_spec(fullname)  # by the other finders: this one has forgotten the name
        except Exception:  # noqa: BLE001 the import goes on, and fails by itself
            return None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == fullname:  # a loader may be shared by modules
                _call(act, module)

        try:
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            return None
        return spec


def _call(act: Act, module: ModuleType) -> None:
    try:
        act(module)
    except Exception as e:  # noqa: BLE001 the job goes on with the module as it is
        logger.warning("rolecall does not see what %s does: %s: %s", module.__name__, type(e).__name__, e)
