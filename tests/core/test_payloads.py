"""The event contract: a payload for each kind, read strictly, and its reference page."""

import json
import math
from dataclasses import FrozenInstanceError, replace

import pytest

from rolecall.core.errors import JournalCorrupt
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.contract import PAYLOADS
from rolecall.core.journal.payloads.recovery import IncidentOpened, OncallPaged
from rolecall.core.journal.payloads.run import StepCommitted
from rolecall.core.journal.rows import event_of
from tests.events import DIAGNOSIS, filled

K = EventKind


def test_every_kind_has_one_payload() -> None:
    assert set(PAYLOADS) == set(K)
    assert len({spec.payload for spec in PAYLOADS.values()}) == len(K)
    assert all(spec.summary and spec.owner and spec.version >= 1 for spec in PAYLOADS.values())


@pytest.mark.parametrize("kind", list(K))
def test_a_payload_comes_back_from_its_stored_body(kind: EventKind) -> None:
    payload = filled(kind)
    stored = json.loads(json.dumps(payload.to_body()))
    assert PAYLOADS[kind].read(stored) == payload
    assert set(stored) == set(PAYLOADS[kind].names)
    with pytest.raises(FrozenInstanceError):
        setattr(payload, PAYLOADS[kind].names[0], None)


def test_values_of_a_body_have_their_types() -> None:
    body = {"diagnosis": DIAGNOSIS.to_dict(), "window": "observations"}
    opened = PAYLOADS[K.INCIDENT_OPENED].read(body)
    assert opened == IncidentOpened(diagnosis=DIAGNOSIS, window="observations")
    step = filled(K.STEP_COMMITTED, {"step": 3, "loss": 2, "groups": ["g-1"], "ledger": {"position": 4, "hash": "ff"}})
    assert isinstance(step, StepCommitted)
    assert (step.loss, step.groups, step.ledger.position) == (2.0, ("g-1",), 4)


def test_a_number_that_is_not_finite_comes_back() -> None:
    step = filled(K.STEP_COMMITTED, {"loss": math.inf})
    assert isinstance(step, StepCommitted)
    stored = json.loads(json.dumps(replace(step, reward=math.nan).to_body(), allow_nan=False))
    found = PAYLOADS[K.STEP_COMMITTED].read(stored)
    assert isinstance(found, StepCommitted)
    assert found.loss == math.inf and found.reward is not None and math.isnan(found.reward)


GOOD = OncallPaged(because="help", channel="log", topic="x").to_body()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"because": "help", "channel": "log"}, "oncall_paged: topic: "),
        ({**GOOD, "plan": "x"}, "oncall_paged: plan: "),
        ({**GOOD, "topic": ["x"]}, "oncall_paged: topic: "),
        ({**GOOD, "schema": 2}, "oncall_paged has version 2, this rolecall reads 1"),
    ],
    ids=["missing", "unknown", "another type", "another version"],
)
def test_a_body_that_does_not_fit_is_damage_of_its_event(body: dict[str, object], message: str) -> None:
    row = {"seq": 7, "kind": "oncall_paged", "wall_at": 1.0, "body": json.dumps(body), "hash": "ff"}
    with pytest.raises(JournalCorrupt, match=f"journal.db: events line 7: cannot be read: {message}"):
        event_of({**row, "incident_id": None, "caused_by": None, "key": None}, "journal.db")
