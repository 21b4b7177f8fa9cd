"""Jobs that rolecall did not start are judged alike, whether or not a watch that may act counts their incarnations."""

import pytest

from rolecall.core.telemetry import UNCOUNTED
from tests.detector.live import torchrun_job


@pytest.fixture(params=[UNCOUNTED, 1], ids=["observed", "counted"])
def incarnation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a module's `pytestmark`."""
    monkeypatch.setattr(torchrun_job, "FIRST_INCARNATION", request.param)
