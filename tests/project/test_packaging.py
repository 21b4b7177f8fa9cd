"""The folders at the root import as rolecall.*, and every folder with code is a package."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("agent", "dashboards", "detector", "recovery", "rl_runtime")


@pytest.mark.parametrize("folder", LINKED)
def test_each_folder_at_the_root_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "rolecall" / folder
    assert link.is_symlink() and str(link.readlink()) == f"../{folder}"


@pytest.mark.parametrize("folder", [*LINKED, "rolecall"])
def test_every_folder_with_code_holds_its_init(folder: str) -> None:
    # A folder without __init__.py imports in the editable install and is missing from the wheel.
    missing = {
        module.parent for module in (ROOT / folder).rglob("*.py") if not (module.parent / "__init__.py").is_file()
    }
    assert not missing
