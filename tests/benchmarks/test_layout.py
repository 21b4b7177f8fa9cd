"""The list of benchmarks is complete, and modules that a benchmark starts by name exist."""

import re
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
LIST = (BENCHMARKS / "README.md").read_text()
STARTED_BY_PATH = {"benchmarks.beside_jobs.torchrun_job", "benchmarks.panels.own_job.job"}
"""Jobs, which import nothing of the package."""


def programs() -> set[str]:
    found = [p for p in BENCHMARKS.rglob("*.py") if '\nif __name__ == "__main__":\n' in p.read_text()]
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for p in found]
    return set(names) - STARTED_BY_PATH


def test_every_program_is_listed() -> None:
    listed = {f"benchmarks.{name}" for name in re.findall(r"^\| `([\w.]+)`", LIST, re.MULTILINE)}
    assert listed == programs()


def test_every_report_is_listed() -> None:
    linked = set(re.findall(r"\]\(results/([^)]+)\)", LIST))
    assert linked == {p.name for p in (BENCHMARKS / "results").glob("*.md")}


def test_modules_that_are_started_by_name_exist() -> None:
    text = "\n".join(p.read_text() for p in BENCHMARKS.rglob("*.py"))
    names = set(re.findall(r'"(benchmarks\.[\w.]+)"', text))
    assert len(names) >= 5
    for name in names:
        assert find_spec(name), name
    assert names <= programs()


def test_jobs_that_are_started_by_path_import_nothing_of_the_package() -> None:
    for name in STARTED_BY_PATH:
        text = (ROOT / name.replace(".", "/")).with_suffix(".py").read_text()
        assert not re.search(r"^\s*(from|import) benchmarks\b", text, re.MULTILINE), name
