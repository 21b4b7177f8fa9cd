"""Python files of users as modules of this package, by path: `load(Path("mine.py"))`.

A module's name is its path in hexadecimal digits. So a file called `math.py` replaces no other module, and whatever
unpickles one of its functions in another process imports the file there, too.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # makes this module a package, whose modules `_Finder` finds
PREFIX = f"{__name__}.file_"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        return spec_from_file_location(fullname, bytes.fromhex(fullname.removeprefix(PREFIX)).decode())


sys.meta_path.append(_Finder())


def load(path: Path) -> ModuleType:
    """The module of the file. It can import the other files of its folder, after all installed modules.

    Raises whatever the file raises.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(f"{PREFIX}{str(path).encode().hex()}")
