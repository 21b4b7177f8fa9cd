"""A module of the job is changed once it has been imported."""

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rolecall.integrations.after_import import AfterImport

NAME = "rolecall_after_import"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "one.py").write_text("VALUE = 1\n")
    (folder / "two.py").write_text(f"from {NAME}.one import VALUE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield folder
    sys.meta_path[:] = finders
    for name in [n for n in sys.modules if n.split(".")[0] == NAME]:
        del sys.modules[name]


def test_others_take_the_changed_name(package: Path) -> None:
    AfterImport({f"{NAME}.one": lambda module: setattr(module, "VALUE", 2)}).install()
    assert importlib.import_module(f"{NAME}.two").VALUE == 2


def test_a_module_that_is_there_is_changed_at_once(package: Path) -> None:
    module = importlib.import_module(f"{NAME}.one")
    AfterImport({f"{NAME}.one": lambda found: setattr(found, "VALUE", 3)}).install()
    assert module.VALUE == 3


def test_what_fails_leaves_the_module_as_it_is(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(module: ModuleType) -> None:
        raise AttributeError("no such class")

    AfterImport({f"{NAME}.one": fail}).install()
    with caplog.at_level(logging.WARNING):
        assert importlib.import_module(f"{NAME}.two").VALUE == 1
    assert f"{NAME}.one" in caplog.text and "no such class" in caplog.text


def test_a_module_that_does_not_exist_is_still_an_import_error(package: Path) -> None:
    AfterImport({f"{NAME}.none": lambda module: None}).install()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{NAME}.none")


def test_a_module_that_fails_raises_its_own_error(package: Path) -> None:
    (package / "bad.py").write_text("raise RuntimeError('of the module')\n")
    AfterImport({f"{NAME}.bad": lambda module: None}).install()
    with pytest.raises(RuntimeError, match="of the module"):
        importlib.import_module(f"{NAME}.bad")
