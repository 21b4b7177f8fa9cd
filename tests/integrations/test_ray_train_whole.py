"""A whole run of Ray Train, as docs/howto/frameworks.md has it: agent, watch and examples/ray_train/train.py.

One worker is stopped and goes on, one is killed and both are started again, and the job ends by itself.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import IncidentClosed, IncidentOpened, IncidentUpdated
from tests.docs.pages import ROOT
from tests.integrations.shell import Shell
from tests.support import eventually

ray_train = pytest.importorskip("ray.train")
if not hasattr(ray_train, "UserCallback"):
    pytest.skip("needs Ray Train v2", allow_module_level=True)
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PAGE = (ROOT / "docs" / "howto" / "frameworks.md").read_text()
SECONDS = 420.0
"""Ray starts, and each worker imports torch, on a machine that may be busy."""
PATIENT = {"RAY_worker_niceness": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(SECONDS)}
"""On a busy machine Ray's workers, which are nice, would start too late for Ray Train."""
RANKS = (("trainer/0", 0), ("trainer/0", 1))
CONTROLLER = ("controller/0", 0)
STEPS_LEARNED = 40


def commands() -> list[str]:
    """The page's terminals: agent, job, watch."""
    section = PAGE.partition("\n## Ray Train\n")[2].partition("\n## ")[0]
    block = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[-1]
    return [line.partition("#")[0].strip() for line in block.splitlines()]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp") as short:  # Ray's sockets have short names only
        it = Shell(tmp_path, {"RAY_TMPDIR": short, **PATIENT})
        yield it
        it.close()


def diagnoses(events: list[Event]) -> list[tuple[FaultClass, set[tuple[str, int | None]], str]]:
    """(class, suspects, text) of each statement about an incident, oldest first; not that this machine is too busy."""
    found = []
    for event in events:
        payload = event.payload
        assert isinstance(payload, IncidentOpened | IncidentUpdated)
        diagnosis = payload.diagnosis
        if "starved of CPU by other processes" in diagnosis.because:
            continue
        named = {(str(s.replica), s.rank) for s in diagnosis.suspects}
        found.append((diagnosis.fault_class, named, diagnosis.because))
    return found


def test_a_worker_that_is_stopped_or_killed_is_named_and_nobody_else(shell: Shell) -> None:
    agent, job, watch, *_ = commands()
    shell.start(agent, "agent.log")
    eventually(lambda: "serves at" in shell.read("agent.log"), "the agent serves")
    shell.start(f"{job} --steps 700", "job.log")
    shell.start(watch, "watch.log")

    def steps() -> list[int]:
        ranks = shell.ranks()
        return [ranks[r].step if r in ranks else -1 for r in RANKS]

    def found() -> list[tuple[FaultClass, set[tuple[str, int | None]], str]]:
        return diagnoses(shell.events(EventKind.INCIDENT_OPENED, EventKind.INCIDENT_UPDATED))

    def outcomes(incident: str) -> list[str]:
        closed = [e for e in shell.events(EventKind.INCIDENT_CLOSED) if e.incident_id == incident]
        return [str(e.payload.outcome) for e in closed if isinstance(e.payload, IncidentClosed)]

    eventually(lambda: min(steps()) >= STEPS_LEARNED, "both workers train", seconds=SECONDS)
    eventually(lambda: CONTROLLER in shell.ranks(), "the controller reports", seconds=SECONDS)
    ranks = shell.ranks()
    assert set(ranks) == {*RANKS, CONTROLLER}, "each process once, under its own name"
    assert {ranks[r].reports_by for r in RANKS} == {"integration"}
    assert ranks[CONTROLLER].loss is not None and ranks[CONTROLLER].step > 0
    assert not found(), "nothing is wrong"

    stopped = ranks[RANKS[1]].pid
    shell.enter(f"kill -STOP {stopped}")
    eventually(found, "the stopped worker is named", seconds=SECONDS)
    shell.enter(f"kill -CONT {stopped}")
    eventually(lambda: outcomes("inc-1-trainer-0"), "it goes on", seconds=SECONDS)
    assert outcomes("inc-1-trainer-0") == ["self_recovered"]
    for fault_class, named, because in found():
        assert (fault_class, named) == (FaultClass.HANG, {("trainer/0", 1)}), because
    before, said = max(steps()), len(found())
    eventually(lambda: max(steps()) > before + 5, "both train again", seconds=SECONDS)

    killed, other = (shell.ranks()[r].pid for r in RANKS)
    shell.enter(f"kill -KILL {killed}")
    eventually(lambda: len(found()) > said, "the killed worker is named", seconds=SECONDS)
    eventually(
        lambda: not {killed, other} & {r.pid for r in shell.ranks().values()} and min(steps()) >= STEPS_LEARNED,
        f"Ray Train starts both again:\n{shell.read('job.log')[-3000:]}",
        seconds=SECONDS,
    )
    crash = found()[said:]
    assert [(c, named) for c, named, _ in crash] == [(FaultClass.CRASH, {("trainer/0", 0)})] * len(crash), crash
    assert "signal 9" in crash[0][2] and "Ray did not end it" in crash[0][2]
    [incident] = {str(e.incident_id) for e in shell.events(EventKind.INCIDENT_OPENED) if "signal 9" in str(e.payload)}
    eventually(lambda: outcomes(incident), "the incident ends", seconds=SECONDS)
    assert outcomes(incident) == ["ended"], "another process has its rank"

    eventually(lambda: not shell.ranks(), "the job ends", seconds=SECONDS)
    assert found()[said + len(crash) :] == [], "a job that ends by itself is no fault"
