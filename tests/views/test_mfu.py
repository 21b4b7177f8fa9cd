"""Model FLOPs utilisation: by hand, against the real model, and what is not known."""

from typing import Any

import pytest

from rolecall.core.config.job import parse_job
from rolecall.core.journal.events import Event
from rolecall.core.journal.events import EventKind as K
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.model import make_model
from rolecall.views.mfu import (
    WINDOW_STEPS,
    MfuMeter,
    mfu_courses,
    num_parameters,
    role_mfu,
    training_flops_per_token,
)
from tests.events import made_event

PEAKS = {"trainer_peak_flops": 1e12, "rollout_peak_flops": 5e11}
FOLDER = {"path": "/models/some", "num_parameters": 7_000_000_000}


def commit(at: float, *, tokens: int = 1000, seconds: float = 2.0, length: float | None = 10.0) -> Event:
    body: dict[str, Any] = {"tokens": tokens, "seconds": seconds, "health": {"response_length": length}}
    return made_event(kind=K.STEP_COMMITTED, wall_at=at, body=body)


def epoch(*members: str) -> Event:
    body = {"epoch": 1, "members": [[m, 1] for m in members], "because": "a test"}
    return made_event(kind=K.EPOCH_ADVANCED, body=body)


def test_the_parameters_are_those_of_the_model_that_is_trained() -> None:
    job = parse_job({})
    model = make_model(job.model, vocabulary(job.model, job.task.name), job.seed)
    named = {n: p.numel() for n, p in model.named_parameters() if "embed" not in n and "lm_head" not in n}
    assert num_parameters(job.model) == sum(named.values())


def test_attention_grows_with_the_length_and_a_folder_needs_its_parameters() -> None:
    local, folder = parse_job({}).model, parse_job({"model": FOLDER}).model
    assert training_flops_per_token(local, 0.0) == 6.0 * (num_parameters(local) or 0)
    longer = (training_flops_per_token(local, 100.0) or 0.0) - (training_flops_per_token(local, 0.0) or 0.0)
    assert longer == 12.0 * local.num_layers * local.num_heads * local.head_dim * 100.0
    assert training_flops_per_token(folder, 100.0) == 42e9
    assert training_flops_per_token(parse_job({"model": {"path": "/models/some"}}).model, 1.0) is None


def test_each_role_by_hand() -> None:
    meter = MfuMeter(parse_job({"model": FOLDER, "runtime": PEAKS}))
    assert meter.take(epoch("trainer/0", "trainer/1", "rollout/0")) is None
    first = meter.take(commit(100.0))
    assert first == {"trainer": pytest.approx(1000 * 42e9 / (2.0 * 2 * 1e12))}, "the first step ends no interval"
    meter.take(epoch("trainer/0", "rollout/0"))
    assert meter.take(commit(110.0)) == {
        "trainer": pytest.approx(1000 * 42e9 / (2.0 * 1e12)),
        "rollout": pytest.approx(1000 * 14e9 / (10.0 * 5e11)),
    }


@pytest.mark.parametrize("job", [{}, {"model": {"path": "/models/some"}, "runtime": PEAKS}])
def test_what_is_not_known_is_not_reported(job: dict[str, Any]) -> None:
    meter = MfuMeter(parse_job(job))
    assert [meter.take(commit(at)) for at in (0.0, 1.0)] == [{}, {}]
    assert role_mfu([{}, {}]) == {}


def test_a_step_without_a_duration_or_an_answer_counts_as_far_as_it_can() -> None:
    meter = MfuMeter(parse_job({"model": FOLDER, "runtime": PEAKS}))
    assert meter.take(commit(0.0, seconds=0.0, length=None)) == {}, "a restarted controller found it committed"
    assert set(meter.take(commit(1.0, length=None)) or {}) == {"trainer", "rollout"}


def test_a_decline_is_one_of_medians_and_of_one_role() -> None:
    steady, falls = [0.3] * 64, [0.4] * 32 + [0.2] * 32
    falls[5] = 0.9  # one quick step is no stretch
    found = role_mfu([{"trainer": a, "rollout": b} for a, b in zip(steady, falls, strict=True)])
    assert found["trainer"].decline == ""
    assert found["rollout"].decline == "fell from 40.00% to 20.00%, medians of 16 steps"
    assert (found["rollout"].best, found["rollout"].newest) == (0.4, 0.2)
    short = role_mfu([{"trainer": v} for v in falls[: WINDOW_STEPS // 2]])
    assert short["trainer"].decline == ""


def test_a_course_has_the_median_at_each_step_from_the_first_full_window_on() -> None:
    steps = {n: {"trainer": 0.4 if n < 20 else 0.1, **({"rollout": 0.2} if n >= 30 else {})} for n in range(40)}
    found = mfu_courses(steps)
    assert found["trainer"] == [(n, 0.4 if n < 27 else 0.25 if n == 27 else 0.1) for n in range(15, 40)]
    assert found["rollout"] == [(39, 0.2)], "of ten steps one median of all"
    assert mfu_courses({1: {}}) == {}
