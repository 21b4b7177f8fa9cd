"""docs/reference/http-api.md has every path that agent and watch serve, and no other."""

import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "reference" / "http-api.md").read_text()
SOURCES = {
    "Agent": sorted((ROOT / "agent" / "http").glob("*.py")),
    "Watch": [ROOT / "rolecall" / "watch" / "server.py"],
}
_PATH = re.compile(r'"(/(?:healthz|metrics(?:/\w+)?|v\d+/[\w/]+))"')


@pytest.mark.parametrize("title", SOURCES)
def test_the_page_has_the_paths_of_the_code(title: str) -> None:
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `([^`?]+)[`?]", section, re.MULTILINE))
    served = {path for source in SOURCES[title] for path in _PATH.findall(source.read_text())}
    assert served and documented == served
