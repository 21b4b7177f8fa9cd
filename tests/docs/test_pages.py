"""Links, images and commands of every page lead somewhere; the site builds without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, commands, complaint

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"```.*?```", re.DOTALL)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_lead_to_files(name: str) -> None:
    page = PAGES[name]
    targets = [t for t in _LINK.findall(_FENCED.sub("", page.read_text())) if "://" not in t and not t.startswith("#")]
    missing = [t for t in targets if not (page.parent / t.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("name", sorted(PAGES))
def test_commands_exist(name: str) -> None:
    wrong = {c: why for c in commands(PAGES[name].read_text()) if (why := complaint(c))}
    assert wrong == {}


def test_a_wrong_command_is_noticed() -> None:
    assert complaint("rolecall repair NODE") == "no such command: repair"
    assert complaint("rolecall audit RUN --repair") == "it has no --repair"


def test_every_page_of_the_site_is_reachable() -> None:
    listed = re.findall(r"^([a-z0-9/*-]+)$", "\n".join(_toctrees()), re.MULTILINE)
    pages = {p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")}
    reached = {match.relative_to(ROOT / "docs").with_suffix("") for entry in listed for match in _matches(entry)}
    assert pages - reached == {Path("index")}


def _toctrees() -> list[str]:
    found = []
    for page in (ROOT / "docs").rglob("*.md"):
        folder = page.parent.relative_to(ROOT / "docs")
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            found += [str(folder / line) for line in tree.splitlines() if line and not line.startswith(":")]
    return found


def _matches(entry: str) -> list[Path]:
    return list((ROOT / "docs").glob(f"{entry}.md"))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html"]
    done = subprocess.run([*command, ROOT / "docs", tmp_path], check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
