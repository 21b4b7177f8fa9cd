"""README stays short, and its numbers stand in the reports that it links; CONTRIBUTING maps at least fifteen
changes."""

import re
import tomllib

import yaml

from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_numbers_of_the_soak_are_those_of_its_report() -> None:
    report = (ROOT / "benchmarks/results/soak_2cores-24gib-cpu_202611.md").read_text()
    named = {"rollout killed during generation": "rollout-kill", "trainer rank hangs": "trainer-hang"}
    named["rollout made four times slower"] = "rollout-slow"
    for title, kind in named.items():
        [row] = [line for line in README.splitlines() if line.startswith(f"| {title} |")]
        [measured] = [x for x in report.splitlines() if x.startswith(f"| {kind} |") and "| fault to finding |" in x]
        median, worst = (float(measured.split("|")[n]) for n in (5, 7))
        shown = re.findall(r"[\d.]+", row.split("|")[3])
        assert shown == [_shown(median), _shown(worst)]


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def test_contributing_maps_many_changes() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| X |")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("| ")]
    assert len(rows) >= 15 and all(row.count("`") >= 4 for row in rows)


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
