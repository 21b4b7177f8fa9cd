"""No component of the controller assigns to another one's fields: state has one owner, others call methods."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.rl_runtime import controller

OWNERS = {
    "LoopState": {"controller.py"},
    "EngineState": {"rollout_pool.py"},
    "OpenGroup": {"trajectories.py"},
    "Trajectory": {"trajectories.py"},
    "_Running": {"evaluation.py"},
}
"""Mutable records -> modules that may assign their fields."""
MODULES = {p.name: ast.parse(p.read_text()) for p in sorted(Path(*controller.__path__).glob("*.py"))}


def fields() -> dict[str, set[str]]:
    """Field -> modules that own a record with such a field."""
    found: dict[str, set[str]] = {}
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in OWNERS:
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        found.setdefault(item.target.id, set()).update(OWNERS[node.name])
    return found


def foreign(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes of anything but `self` and `cls`."""
    for node in ast.walk(tree):
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if isinstance(node, ast.Attribute) and not own:
            yield node


@pytest.mark.parametrize("module", list(MODULES))
def test_a_module_assigns_only_fields_of_its_own_records(module: str) -> None:
    owners = fields()
    assigned = [n for n in foreign(MODULES[module]) if isinstance(n.ctx, ast.Store | ast.Del)]
    pokes = [f"{module}:{n.lineno} {ast.unparse(n)}" for n in assigned if module not in owners.get(n.attr, set())]
    assert not pokes, pokes


@pytest.mark.parametrize("module", list(MODULES))
def test_a_module_uses_no_private_name_of_another_object(module: str) -> None:
    private = [n for n in foreign(MODULES[module]) if n.attr.startswith("_") and not n.attr.startswith("__")]
    assert not private, [f"{module}:{n.lineno} {ast.unparse(n)}" for n in private]
