"""The folders at the root are packaged as rolecall.*, and none is forgotten."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
VIEW = ROOT / "tools" / "typing"
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDER_OF = {"rolecall": "rolecall", **SETUPTOOLS["package-dir"]}


def test_every_package_is_listed() -> None:
    found = {
        ".".join([name, *init.parent.relative_to(ROOT / folder).parts])
        for name, folder in FOLDER_OF.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(SETUPTOOLS["packages"])


def test_type_checkers_see_the_installed_tree() -> None:
    for package in SETUPTOOLS["packages"]:
        init = VIEW / Path(*package.split(".")) / "__init__.py"
        assert init.is_file(), f"{package} has no link under {VIEW}"
        assert VIEW not in init.resolve().parents, f"{init} is a copy, not a link"


def test_type_checkers_see_every_module_of_the_top_package() -> None:
    # Sub-packages are linked as folders; modules beside cli.py one by one, so each can be forgotten.
    modules = {p.name for p in (ROOT / "rolecall").glob("*.py")}
    linked = {p.name for p in (VIEW / "rolecall").glob("*.py")}
    assert linked == modules
    assert all((VIEW / "rolecall" / name).resolve() == ROOT / "rolecall" / name for name in linked)


def test_no_folder_shadows_a_mapped_package() -> None:
    # A bare rolecall/agent/ would import as an empty namespace package instead of agent/.
    for folder in SETUPTOOLS["package-dir"].values():
        assert not (ROOT / "rolecall" / folder).exists()


def test_every_folder_with_code_holds_its_init() -> None:
    # A folder without __init__.py imports in the editable install and is missing from the wheel.
    for folder in FOLDER_OF.values():
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), f"{module.parent} has no __init__.py"
