"""The orphan reaper: from a diagnosis to the end of a process that is proven an orphan, and of no other one."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.config.actuators import ReaperConfig
from rolecall.core.config.job import RecoveryConfig
from rolecall.core.config.watched import parse_watched
from rolecall.core.diagnosis import ActionKind, Diagnosis, Evidence, Plan, Suspect
from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ProcessId, process_start_ticks
from rolecall.core.text import IS_GONE
from rolecall.node.orphans import refuse_unless_orphan
from rolecall.recovery.actuators.external import ExternalActuator
from rolecall.recovery.actuators.targets.reaper import Reaper
from rolecall.recovery.fleet_view import FleetView
from rolecall.recovery.guards import Situation, check
from rolecall.recovery.incidents import ActionFailure, Attempt, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.next_step import Append, Perform, next_step
from rolecall.recovery.policy import FailedAttempt, PolicyInput, decide
from tests.agent.collectors.test_orphans import SERVER, TITLE, adopted
from tests.recovery.actuators.test_external import DEADLINE, World, world
from tests.support import eventually

__all__ = ["world"]
A, S = ActionKind, IncidentState
NOW = 100_000.0
PROCESS = ProcessId(node=NodeId("n"), pid=40, start_ticks=400)
DIAGNOSIS = Diagnosis(
    suspects=(Suspect(node=NodeId("n"), process=PROCESS),),
    fault_class=FaultClass.RESOURCE_EXHAUSTED,
    onset=1.0,
    detected_at=2.0,
    confidence=0.9,
    because="VLLM::EngineCore has lost its server",
    evidence=(Evidence(kind="process", text="it"),),
    detectors=("orphan",),
    advice="on n: rolecall node end 40",
    about=":orphan:40-400",
)


def decided(
    *past: FailedAttempt, supports: frozenset[ActionKind] = frozenset({A.END_ORPHAN, A.REPLACE_REPLICA})
) -> Plan:
    facts = PolicyInput(
        incident_id=IncidentId("inc-1"), diagnosis=DIAGNOSIS, fleet=FleetView(replicas=()), past=past, supports=supports,
        config=RecoveryConfig(mode="act"),
    )  # fmt: skip
    assert PolicyInput.from_dict(facts.to_dict()) == facts
    decision = decide(facts)
    assert decision.page_oncall == (decision.plan.action is A.TOLERATE)
    return decision.plan


def test_an_orphan_is_ended_once_and_else_on_call_gets_the_command() -> None:
    plan = decided()
    assert plan.action is A.END_ORPHAN and plan.process == PROCESS and plan.targets == ()
    assert plan.words == "end orphan: process 40 on n" and plan.intent == "end the orphaned process 40 on n"
    assert Plan.from_dict(plan.to_dict()) == plan
    assert replace(plan, process=replace(PROCESS, start_ticks=401)).digest != plan.digest
    assert decided(supports=frozenset({A.REPLACE_REPLICA})).action is A.TOLERATE
    failed = FailedAttempt(failure=ActionFailure.REFUSED, action=A.END_ORPHAN, targets=(), because="it is no orphan")
    again = decided(failed)
    assert (
        again.action is A.TOLERATE and "it is no orphan" in again.because and again.because.endswith(DIAGNOSIS.advice)
    )


def incident(name: str = "inc-1", state: IncidentState = S.PLANNED, started: float | None = None) -> Incident:
    plan = replace(decided(), incident_id=IncidentId(name))
    attempt = Attempt(
        number=1, plan=plan, page_oncall=False, outcome="tolerated", made_at=0.0, started_at=started, done_at=started
    )
    return Incident(
        incident_id=name, state=state, diagnosis=DIAGNOSIS, opened_at=0.0, seen_keys=frozenset({DIAGNOSIS.key}),
        attempts=(attempt,), outcome=IncidentOutcome.RESOLVED if state is S.CLOSED else None,
    )  # fmt: skip


def situation(*others: Incident, mode: str = "act", absent: float = 0.0, limit: int = 6, **more: object) -> Situation:
    config = RecoveryConfig(mode=mode, evictions_per_hour_max=limit)  # type: ignore[arg-type]
    return Situation(
        now=NOW, fleet=FleetView(replicas=()), config=config, incidents=others, absent_seconds=absent, **more
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "guard"),
    [
        (situation(), ""),
        (situation(mode="observe"), "mode"),
        (situation(paused="bob"), "paused"),
        (situation(stopping="x"), "stopping"),
        (situation(limit=0), "evictions"),
        (situation(incident("inc-2", S.CLOSED, NOW - 10), limit=1), "evictions"),
        (situation(incident("inc-2", S.CLOSED, NOW - 3700), limit=1), ""),
    ],
)
def test_guards(given: Situation, guard: str) -> None:
    this = incident()
    assert check(this.attempts[0].plan, this, given).guard == guard


def step(this: Incident, given: Situation) -> str:
    question = PolicyInput(
        incident_id=IncidentId("inc-1"), diagnosis=DIAGNOSIS, fleet=FleetView(replicas=()), past=(),
        supports=frozenset({A.END_ORPHAN}), config=given.config,
    )  # fmt: skip
    move = next_step(this, given, question)
    return str(move.payload.kind) if isinstance(move, Append) else type(move).__name__


def test_the_way_of_its_incident() -> None:
    assert step(incident(), situation()) == "action_started"
    assert step(incident(), situation(mode="approve")) == "plan_proposed"
    acting = incident(state=S.ACTING, started=NOW - 1)
    assert step(acting, situation()) == Perform.__name__
    assert step(acting, situation(paused="bob")) == "NoneType"
    verifying = incident(state=S.VERIFYING, started=NOW - 1)
    assert step(verifying, situation()) == "NoneType", "its agent has not looked again"
    assert step(verifying, situation(absent=10.0)) == "incident_verified"
    assert step(incident(state=S.VERIFYING, started=NOW - 1000), situation()) == "action_failed"


def reaping(world: World, program: tuple[str, ...]) -> ExternalActuator:
    config = ReaperConfig(program=program, grace_seconds=0.0)
    made = ExternalActuator(
        Reaper(config), world.journal, lambda: world.members, world.clock, deadline_seconds=DEADLINE
    )
    world.actuators.append(made)
    world.actuator = made
    return made


def test_the_call_names_pid_start_time_and_that_it_must_be_an_orphan(world: World) -> None:
    reaping(world, ("/bin/echo",))
    world.members = []
    result = world.perform(decided())
    assert result is not None and result.done and "ended the orphan with pid 40 on n" in result.because
    assert world.calls() == ["/bin/echo node end 40 --start-ticks 400 --orphan"] and world.target.made == []
    assert world.perform(decided()).done and len(world.calls()) == 1, "a successor uses the recorded reply"  # type: ignore[union-attr]


def test_an_orphan_that_is_not_there_was_not_ended(world: World) -> None:
    """It had ended, or the command ran on another machine."""
    reaping(world, ("/bin/sh", "-c", f"echo process 40 {IS_GONE}"))
    world.members = []
    result = world.perform(decided())
    assert result is not None and "it had ended before, or orphans.run_on_node must say" in result.because


def test_a_failed_call_is_no_success(world: World) -> None:
    reaping(world, ("/bin/false",))
    world.members = []
    result = world.perform(decided())
    assert result is not None and not result.done and "status 1" in result.because


def test_a_rank_of_any_job_is_no_orphan(world: World) -> None:
    reaping(world, ("/bin/echo",))
    _, member = world.members[0]
    world.members = [(0, replace(member, node="n", pid=40, start_ticks=400, foreign=True))]
    result = world.perform(decided())
    assert result is not None and not result.done and "and no orphan" in result.because and world.calls() == []


def test_several_nodes_need_a_way_to_reach_them(world: World) -> None:
    reaping(world, ("/bin/echo",))
    _, member = world.members[0]
    world.members = [(1, replace(member, node="other"))]
    result = world.perform(decided())
    assert result is not None and not result.done and "orphans.run_on_node" in result.because and world.calls() == []


def test_the_file_says_who_may() -> None:
    one = {"actuator": {"kind": "processes"}, "roles": ["rollout"]}
    assert parse_watched(one).orphans is None
    assert parse_watched({**one, "orphans": {}}).orphans == ReaperConfig()
    alone = parse_watched({"orphans": {"mode": "act"}})
    assert (alone.actuator, alone.recovery.mode, alone.orphans_mode) == (None, "observe", "act")
    assert parse_watched({"orphans": {}}).orphans_mode == "observe", "without an actuator no mode is inherited"
    both = {**one, "recovery": {"mode": "act"}}
    assert parse_watched({**both, "orphans": {}}).orphans_mode == "act"
    assert parse_watched({**both, "orphans": {"mode": "observe"}}).orphans_mode == "observe"
    with pytest.raises(ConfigError, match=r"recovery.mode: act needs an actuator; for orphans alone set orphans.mode"):
        parse_watched({"recovery": {"mode": "act"}, "orphans": {}})
    with pytest.raises(ConfigError, match="deadline_seconds: must be at least 630"):
        parse_watched({**one, "orphans": {"grace_seconds": 600}})
    for wrong in ({"orphans": {"mode": "kill"}}, {**one, "orphans": {"run_on_node": ["ssh", "{replica}"]}}):
        with pytest.raises(ConfigError, match="orphans"):
            parse_watched(wrong)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[int]:
    """PID of an engine's process whose server lives."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-S", "-c", SERVER, TITLE], stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        pid = int(server.stdout.readline())
        eventually(lambda: TITLE in Path(f"/proc/{pid}/cmdline").read_text(), "it has its title")
        yield pid
        server.stdin.close()


def test_an_engine_whose_server_lives_is_refused(engine: int, world: World) -> None:
    ticks = process_start_ticks(engine)
    assert ticks is not None
    with pytest.raises(CommandRefused, match="is no orphan of an engine: its parent is python"):
        refuse_unless_orphan(engine, ticks)
    refuse_unless_orphan(engine, ticks + 1)  # another process has the PID: `end` says that this one is gone
    reaping(world, (sys.executable, "-m", "rolecall"))
    world.members = []
    process = ProcessId(node=NodeId("n"), pid=engine, start_ticks=ticks)
    result = world.perform(replace(decided(), process=process))
    assert result is not None and not result.done and "is no orphan of an engine" in result.because
    assert Path(f"/proc/{engine}/stat").read_text().split()[2] in "SRD", "it goes on"


def test_a_real_orphan_is_ended_and_no_other_process_that_has_its_pid_by_then(tmp_path: Path, world: World) -> None:
    with adopted(tmp_path) as (_, pid):
        reaping(world, (sys.executable, "-m", "rolecall"))
        world.members = []
        ticks = process_start_ticks(pid) or 0
        earlier = ProcessId(node=NodeId("n"), pid=pid, start_ticks=ticks - 1)
        result = world.perform(replace(decided(), process=earlier))
        assert result is not None and result.done, result
        assert Path(f"/proc/{pid}/stat").read_text().split()[2] in "SR", "it is another process than the one named"
        result = world.perform(replace(decided(), process=replace(earlier, start_ticks=ticks)))
        assert result is not None and result.done, result
        assert Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
