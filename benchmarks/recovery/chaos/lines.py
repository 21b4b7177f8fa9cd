"""Result lines: one of each fault, each piece and each run without faults."""

from collections.abc import Mapping
from typing import Any

from benchmarks import common

LINES = common.RESULTS / "chaos.jsonl"
Line = Mapping[str, Any]


def add_line(line: Line) -> None:
    common.add_line(LINES, line)


def read_lines() -> list[dict[str, Any]]:
    return common.read_lines(LINES)
