"""docs/states.md has every state of every state machine that it describes."""

import re
from enum import StrEnum

import pytest

from rolecall.core.journal.ledger import GroupState
from rolecall.core.membership import ReplicaState
from rolecall.core.telemetry import Phase
from rolecall.recovery.incidents import ActionFailure, Decision, IncidentOutcome, IncidentState
from rolecall.rl_runtime.controller.trajectories import GroupPhase
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "states.md").read_text()
SECTIONS: dict[str, tuple[type[StrEnum], ...]] = {
    "Replica (actual state)": (ReplicaState,),
    "Incident": (IncidentState, IncidentOutcome, ActionFailure, Decision),
    "Prompt group (ledger)": (GroupState,),
    "Prompt group (generation)": (GroupPhase,),
    "Process phase": (Phase,),
}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_state_is_described(title: str) -> None:
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert {str(s) for states in SECTIONS[title] for s in states} <= named


@pytest.mark.parametrize("title", ["Replica (actual state)", "Prompt group (ledger)", "Process phase"])
def test_no_state_is_invented(title: str) -> None:
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert rows == {str(s) for states in SECTIONS[title] for s in states}
