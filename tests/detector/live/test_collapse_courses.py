"""The engine on courses of our own real training: courses.json, made by `benchmarks/detection/collapse/ make` and `keep`.

What was done to each stands in its `spec` (see benchmarks/detection/collapse/courses.py): from row `at` on a learning rate thirty
times as high, a reward function that gives a constant, ...; or nothing, or a rollback.

pytest tests/detector/live/test_collapse_courses.py
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.detector.live.engine import LiveDetector
from tests.detector.courses import Row, reported

COURSES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "courses.json").read_text())
SPOILED = {
    "lr x10": FaultClass.USER_CODE,
    "lr x30": FaultClass.USER_CODE,
    "reward_constant": FaultClass.USER_CODE,
    "reward_sign": FaultClass.USER_CODE,
    "reckless": FaultClass.USER_CODE,
    "weights": FaultClass.SILENT_CORRUPTION,
}
MISSED = {"data"}
"""Spoiled before the policy had learned what the data then took away: a reward that stops to rise has not fallen."""
STEPS_MAX = 32
"""Told within so many steps of the first spoiled one."""
SHUT_FROM = {"reckless": 43}
"""Of what was reckless from the first step on: when its entropy was gone."""


def rows(name: str) -> list[Row]:
    columns = COURSES[name]["columns"]
    there = zip(*columns.values(), strict=True)
    return [{k: math.nan if v is None else v for k, v in zip(columns, row, strict=True)} for row in there]


@pytest.mark.parametrize("name", COURSES)
def test_a_spoiled_course_is_reported_once_and_in_time_and_a_healthy_one_never(name: str) -> None:
    detector, found = LiveDetector(DetectorConfig()), dict[str, tuple[int, Diagnosis]]()
    for looks, observation in enumerate(reported(rows(name))):
        for d in detector.observe(observation):
            found.setdefault(d.key, (looks // 2, d))
    if name not in SPOILED:
        assert not found
        return
    (row, d), begun = next(iter(found.values())), SHUT_FROM.get(name, COURSES[name]["spec"]["at"])
    assert [d.fault_class for _, d in found.values()] == [SPOILED[name]]
    assert begun < row <= begun + STEPS_MAX and not d.suspects


def test_some_of_each_are_kept() -> None:
    assert COURSES.keys() >= SPOILED.keys()
    assert len(COURSES.keys() - SPOILED.keys() - MISSED) >= 5
