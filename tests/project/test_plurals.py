"""Texts of the product count with the right plural (`rolecall.core.text.counted`), never with `thing(s)`."""

import ast
import re
from pathlib import Path

import pytest

from rolecall.core.text import counted

ROOT = Path(__file__).parents[2]
PLURAL = re.compile(r"[a-z]\((s|es|ies)\)(?!://|\w)")
FOLDERS = ("agent", "dashboards", "detector", "recovery", "rl_runtime", "rolecall")


def _texts(tree: ast.AST) -> list[str]:
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_text_leaves_the_plural_to_the_reader(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in _texts(ast.parse(path.read_text()))
        if PLURAL.search(text)
    }
    assert not found


@pytest.mark.parametrize(
    ("number", "noun", "plural", "text"),
    [
        (0, "finding", "", "0 findings"),
        (1, "finding", "", "1 finding"),
        (1024, "process", "processes", "1,024 processes"),
        (1, "process", "processes", "1 process"),
    ],
)
def test_counts(number: int, noun: str, plural: str, text: str) -> None:
    assert counted(number, noun, plural) == text
