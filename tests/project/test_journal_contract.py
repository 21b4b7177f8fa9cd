"""Nobody but the journal touches the JSON of a stored event: writers append payloads, readers get payloads."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOURNAL = ROOT / "rolecall" / "core" / "journal"
FOLDERS = ("agent", "benchmarks", "dashboards", "detector", "recovery", "rl_runtime", "rolecall")
MODULES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(JOURNAL) and not any(p.is_symlink() for p in path.parents)
)
JOURNAL_USERS = [path for path in MODULES if "rolecall.core.journal" in path.read_text()]


def _raw(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where a body is indexed, asked with `.get` or written unchecked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _is_body(node.value):
            yield node.lineno, "indexes a raw body"
        if isinstance(node, ast.Attribute) and node.attr == "get" and _is_body(node.value):
            yield node.lineno, "asks a raw body"
        if isinstance(node, ast.Attribute) and node.attr == "append_unchecked":
            yield node.lineno, "writes a body that nothing checks"


def _is_body(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "to_body"
    return isinstance(node, ast.Attribute) and node.attr == "body"


@pytest.mark.parametrize(
    "code", ["e.body['step']", "e.body.get('step')", "e.payload.to_body()['step']", "journal.append_unchecked(k, {})"]
)
def test_each_way_around_the_payloads_is_found(code: str) -> None:
    assert list(_raw(ast.parse(code)))


def test_no_module_indexes_a_raw_body() -> None:
    assert len(JOURNAL_USERS) > 50
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for path in JOURNAL_USERS
        for line, what in _raw(ast.parse(path.read_text()))
    ]
    assert found == []
