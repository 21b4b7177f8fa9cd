"""Files, folders and tests that a page names exist."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

TOP = "agent|examples|detector|recovery|dashboards|rl_runtime|rolecall|tests|benchmarks|deploy|docs|tools|requirements"
_PATH = re.compile(rf"`((?:{TOP})/[\w./*-]*)(?:::(\w+))?`")
CHECKED = sorted(
    n
    for n in PAGES
    if n in ("README.md", "CONTRIBUTING.md", "deploy/README.md")
    or (n.startswith("docs/") and not n.startswith("docs/runbooks/"))
)


def _missing(text: str) -> list[str]:
    missing = []
    for path, test in _PATH.findall(text):
        found = list(ROOT.glob(path.rstrip("/"))) if "*" in path else [ROOT / path]
        if not found or not all(p.exists() for p in found):
            missing.append(path)
        elif test and f"def {test}(" not in Path(found[0]).read_text():
            missing.append(f"{path}::{test}")
    return missing


@pytest.mark.parametrize("name", CHECKED)
def test_named_files_and_tests_exist(name: str) -> None:
    assert _missing(PAGES[name].read_text()) == []


def test_a_missing_file_or_test_is_noticed() -> None:
    assert _missing("`agent/nowhere.py`") == ["agent/nowhere.py"]
    assert _missing("`tests/docs/test_paths.py::test_nothing`") == ["tests/docs/test_paths.py::test_nothing"]
