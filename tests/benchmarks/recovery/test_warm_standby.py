"""What the benchmark reads from the journal after a kill."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import common
from benchmarks.recovery import warm_standby
from rolecall.core.diagnosis import Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import Event, EventKind
from tests.events import DIAGNOSIS, made_event

K = EventKind


def after_a_kill(*, named: str = "rollout/1", members: list[list[Any]], closed: bool = True) -> list[Event]:
    suspect = Suspect(replica=named, incarnation=3, node=NodeId("node-4"), role="rollout")
    diagnosis = replace(DIAGNOSIS, fault_class=FaultClass.CRASH, suspects=(suspect,)).to_dict()
    found = [
        made_event(kind=K.INCIDENT_OPENED, body={"diagnosis": diagnosis}, wall_at=100.5, incident_id="inc-1", seq=1),
        made_event(kind=K.EPOCH_ADVANCED, body={"members": [["rollout/1", 3]]}, wall_at=100.6, seq=2),
        made_event(kind=K.EPOCH_ADVANCED, body={"members": members}, wall_at=101.25, seq=3),
    ]
    if closed:
        found.append(made_event(kind=K.INCIDENT_CLOSED, body={}, wall_at=103.0, incident_id="inc-1", seq=4))
    return found


def test_a_replacement_is_at_work_once_its_incarnation_is_in_the_epoch() -> None:
    found = warm_standby.measured(after_a_kill(members=[["rollout/1", 4]]), "rollout/1", 100.0)
    assert found == {"named": True, "found": 0.5, "from_finding": 0.75, "from_kill": 1.25}


def test_nothing_is_measured_before_the_incident_is_closed() -> None:
    events = after_a_kill(members=[["rollout/1", 4]], closed=False)
    assert warm_standby.measured(events, "rollout/1", 100.0) is None


def test_a_wrong_name_is_no_success() -> None:
    found = warm_standby.measured(after_a_kill(named="rollout/0", members=[["rollout/1", 4]]), "rollout/1", 100.0)
    assert found is not None and not found["named"] and found["from_kill"] is None


def test_p99_of_few_values_is_the_worst() -> None:
    assert common.quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert common.quantile([float(n) for n in range(200)], 0.99) == pytest.approx(198.0)
