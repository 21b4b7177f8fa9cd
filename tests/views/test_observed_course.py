"""The course of a watched job over its steps: bounded, cut where the job goes back, and the same after a round trip."""

import math
from typing import Any

import pytest

from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import NO_PAGE, ProcessSample
from rolecall.views.observed_course import POINTS_MAX, Course, CoursePoint, from_json, point_of, to_json


def sample(step: int, rank: int = 0, role: str = "trainer", at: float = 0.0, **page: Any) -> ProcessSample:
    fields: dict[str, Any] = {"phase": "step", "progress": max(0, step), "progress_at": at} | page
    return ProcessSample(
        process=ProcessId(node=NodeId("vm"), pid=40 + rank, start_ticks=1), role=role, replica=f"{role}/0", rank=rank,
        incarnation=0, at=at + 1.0, wall_at=1001.0 + at, alive=True, page_ok=True, step=step, **fields,
    )  # fmt: skip


def take(course: Course, *samples: ProcessSample) -> None:
    course.take({s.process: s for s in samples})


def test_the_newest_rank_says_where_the_job_stands() -> None:
    found = point_of((sample(7, 0, at=10.0), sample(8, 1, at=14.0), sample(8, 2, at=15.0)))
    assert found == CoursePoint(step=8, at=1015.0, values={})


def test_values_are_means_of_the_ranks_that_tell_them() -> None:
    found = point_of((sample(3, 0, reward=1.0, loss=0.5), sample(3, 1, reward=2.0), sample(3, 2, loss=math.inf)))
    assert found is not None and found.values == {"reward": 1.5, "loss": 0.5}
    health = point_of((sample(3, 0, entropy=0.7, healths=2), sample(3, 1, entropy=9.0)))
    assert health is not None and health.values == {"entropy": 0.7}, "no report of health, no health"


@pytest.mark.parametrize(
    ("samples", "step"),
    [
        ((sample(40), sample(8, 1, "controller", reward=0.4)), 8),  # whoever knows the reward counts the job's steps
        ((sample(40), sample(8, 1, "controller")), 40),
        ((sample(8, 1, "critic"), sample(-1, 2, "rollout")), 8),
    ],
)
def test_whose_steps_are_the_jobs(samples: tuple[ProcessSample, ...], step: int) -> None:
    found = point_of(samples)
    assert found is not None and found.step == step


def test_a_job_without_steps_has_no_course() -> None:
    course = Course()
    take(course, sample(-1), sample(5, 1, phase=NO_PAGE))
    assert course.points == ()


def test_the_newest_point_of_a_step_replaces_the_one_before() -> None:
    course = Course()
    for reward in (0.1, 0.2):
        take(course, sample(1, reward=reward))
    assert [(p.step, p.values["reward"]) for p in course.points] == [(1, 0.2)]


def test_a_long_course_is_bounded_and_keeps_its_ends() -> None:
    course = Course()
    for step in range(5000):
        take(course, sample(step, at=float(step)))
    found = [p.step for p in course.points]
    assert POINTS_MAX / 2 <= len(found) <= POINTS_MAX
    assert found[0] == 0 and found[-1] == 4999 and found == sorted(set(found))


def test_a_job_that_goes_back_does_those_steps_again() -> None:
    course = Course()
    for step in (1, 2, 3, 4, 2):
        take(course, sample(step, at=float(step)))
    assert [p.step for p in course.points] == [1, 2]


def test_it_survives_the_journal_and_garbage_is_nothing() -> None:
    points = (CoursePoint(step=1, at=1000.25, values={"reward": 0.5}), CoursePoint(step=9, at=1010.0))
    assert from_json(to_json(points)) == points
    assert from_json(None) == from_json("{") == from_json("[[1]]") == from_json("[[1, 2, 3]]") == ()
