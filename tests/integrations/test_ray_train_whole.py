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
from rolecall.core.journal.payloads import IncidentClosed, IncidentOpened, IncidentUpdated
from tests.docs.pages import ROOT
from tests.integrations.shell import Shell
from tests.support import eventually

ray_train = pytest.importorskip("ray.train")
if not hasattr(ray_train, "UserCallback"):
    pytest.skip("needs Ray Train v2", allow_module_level=True)
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

PAGE = (ROOT / "docs" / "howto" / "frameworks.md").read_text()
SECONDS = 240.0
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
    """(class, suspects, text) of each statement about an incident, oldest first."""
    found = []
    for event in events:
        payload = event.payload
        assert isinstance(payload, IncidentOpened | IncidentUpdated)
        diagnosis = payload.diagnosis
        named = {(str(s.replica), s.rank) for s in diagnosis.suspects}
        found.append((diagnosis.fault_class, named, diagnosis.because))
    return found


def test_a_worker_that_is_stopped_or_killed_is_named_and_nobody_else(shell: Shell) -> None:
    agent, job, watch, *_ = commands()
    shell.start(agent, "agent.log")
    eventually(lambda: "serves at" in shell.read("agent.log"), "the agent serves")
    shell.start(f"{job} --steps 1500", "job.log")
    shell.start(watch, "watch.log")

    def steps() -> list[int]:
        ranks = shell.ranks()
        return [ranks[r].step if r in ranks else -1 for r in RANKS]

    def opened() -> list[Event]:
        return shell.events(EventKind.INCIDENT_OPENED, EventKind.INCIDENT_UPDATED)

    def closed(number: int) -> list[str]:
        payloads = [e.payload for e in shell.events(EventKind.INCIDENT_CLOSED)]
        return [str(p.outcome) for p in payloads if isinstance(p, IncidentClosed)][number - 1 :]

    eventually(lambda: min(steps()) >= STEPS_LEARNED, "both workers train", seconds=SECONDS)
    ranks = shell.ranks()
    assert set(ranks) == {*RANKS, CONTROLLER}, "each process once, under its own name"
    assert {ranks[r].reports_by for r in RANKS} == {"integration"}
    assert ranks[CONTROLLER].loss is not None and ranks[CONTROLLER].step > 0
    assert not opened(), f"nothing is wrong: {diagnoses(opened())}"

    stopped = ranks[RANKS[1]].pid
    shell.enter(f"kill -STOP {stopped}")
    eventually(opened, "the stopped worker is named", seconds=SECONDS)
    shell.enter(f"kill -CONT {stopped}")
    eventually(lambda: closed(1), "it goes on", seconds=SECONDS)
    assert closed(1) == ["self_recovered"]
    for fault_class, named, because in diagnoses(opened()):
        assert (fault_class, named) == (FaultClass.HANG, {("trainer/0", 1)}), because
    before, said = max(steps()), len(opened())
    eventually(lambda: max(steps()) > before + 5, "both train again", seconds=SECONDS)

    killed, other = (shell.ranks()[r].pid for r in RANKS)
    shell.enter(f"kill -KILL {killed}")
    eventually(lambda: len(opened()) > said, "the killed worker is named", seconds=SECONDS)
    eventually(
        lambda: not {killed, other} & {r.pid for r in shell.ranks().values()} and min(steps()) >= STEPS_LEARNED,
        f"Ray Train starts both again:\n{shell.read('job.log')[-3000:]}",
        seconds=SECONDS,
    )
    eventually(lambda: closed(2), "the incident ends", seconds=SECONDS)
    found = diagnoses(opened())[said:]
    assert [named for _, named, _ in found] == [{("trainer/0", 0)}] * len(found), found
    assert {c for c, _, _ in found} == {FaultClass.CRASH} and "signal 9" in found[0][2], found
    assert closed(2) == ["ended"], "another process has its rank"

    eventually(lambda: not shell.ranks(), "the job ends", seconds=SECONDS)
    assert len(opened()) == said + len(found), f"a job that ends by itself is no fault: {diagnoses(opened())[-1]}"
