"""Signs of a policy's health are read from any line that a journal may hold, and cover what trainers measure."""

import math
from dataclasses import fields
from typing import Any

import pytest

from rolecall.core.journal.payloads.contract import EventKind
from rolecall.core.journal.payloads.run import StepCommitted
from rolecall.core.metrics.catalogue import BY_NAME as METRICS
from rolecall.core.policy_health import BY_NAME, SIGNS, policy_health_of
from rolecall.core.telemetry import HEALTH_SIGNS
from rolecall.rl_runtime.protocol.policy_health import PolicyHealth
from tests.events import filled


def test_every_health_metric_of_trainers_has_a_metric_and_a_text() -> None:
    assert {f.name for f in fields(PolicyHealth)} <= set(BY_NAME)
    assert set(HEALTH_SIGNS) <= set(BY_NAME) and len(BY_NAME) == len(SIGNS)
    for sign in SIGNS:
        assert METRICS[f"rolecall_run_{sign.metric}"].help == sign.help
        assert (f"rolecall_train_{sign.metric}" in METRICS) == (sign.name in HEALTH_SIGNS)
        assert sign.normal.endswith(".") and "|" not in sign.normal


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        ({"step": 3, "loss": 0.1}, {}),
        ({"health": {}, "log_ratio_max": 0.25}, {"log_ratio_max": 0.25}),
        (
            {"health": {"entropy": 1, "ratio_mean": None, "filtered_fraction": 0.0}},
            {"entropy": 1.0, "filtered_fraction": 0.0},
        ),
        ({"health": {"log_ratio_max": 0.5}, "log_ratio_max": 0.25}, {"log_ratio_max": 0.5}),
        ({"health": {"entropy": "nan", "kl_sampler": "inf"}}, {"kl_sampler": math.inf}),
        ({"health": {"invented_later": 0.5}}, {}),
    ],
    ids=str,
)
def test_a_step_has_only_measured_metrics(body: dict[str, Any], reported: dict[str, float]) -> None:
    step = filled(EventKind.STEP_COMMITTED, body)
    assert isinstance(step, StepCommitted) and policy_health_of(step) == reported
