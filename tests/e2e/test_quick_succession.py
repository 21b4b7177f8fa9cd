"""Faults that come while the one before is in recovery, each struck by this test at a moment that it proves to be the
one meant.

In the end the supervisor itself is killed: every group stays accounted for, and `down` removes the rest.
"""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.processes.state_pages import PageReader, PageState, PageUnreadable
from rolecall.core.rundir import RunDir, write_atomically
from rolecall.rl_runtime.controller.batch_assembler import TOO_STALE
from rolecall.rl_runtime.faults.injector import inject
from rolecall.rl_runtime.faults.process_side import WEIGHTS, InjectionRequest, InProcessFault, effect_path, request_path
from rolecall.rl_runtime.processes import find_processes
from tests.e2e.observer import ESTABLISHED, LISTEN, Observer, is_alive, socket_inodes, stopped, tcp_sockets
from tests.e2e.runs import DemoRun, alive, command, demo_run, rolecall
from tests.support import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STREAMS_MIN = 16
GROUP_SIZE = 8
NUM_NODES = 7
NUM_DIGITS = 24
"""Longer responses than the demo's, so that streams are open most of the time."""
RECOVERY_SECONDS = 240.0
"""A cold start alone takes a minute when the machine has other work."""
ROLLOUTS = ("rollout/0", "rollout/1", "rollout/2")
OPEN = ("issued", "assigned", "returned", "undone")
AGREEMENT_SECONDS = 1.0
"""As in `test_demo.py`."""


def test_faults_in_quick_succession_cost_no_token_and_no_group(tmp_path: Path) -> None:
    settings = [f"task.num_digits={NUM_DIGITS}", "recovery.evictions_per_hour_max=20"]
    args = ["--seed", "13", "--faults", "none", "--allow-injection", "--steps", "100000"]
    with demo_run(tmp_path, "succession", [*args, *(word for s in settings for word in ("--set", s))]) as run:
        run.until_step(2, 200)
        open_groups = _controller_dies_with_streams_open(run)
        eventually(
            lambda: run.observer.states.get(("standby/0", 1)) == "ready", "the standby", seconds=RECOVERY_SECONDS
        )
        _replacement_dies_while_it_starts_and_a_trainer_hangs_meanwhile(run)
        _trainer_with_the_newest_weights_dies_during_a_pull(run)
        run.until_step(len(run.observer.steps) + 2, RECOVERY_SECONDS)
        _down_removes_what_kill_9_left(run)
    assert run.observer.listening_elsewhere == set()
    _nothing_was_lost(run, open_groups)


# --- the controller ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """Processes that were stopped when the controller was killed."""

    num_streams: int
    tokens_made: int  # by all engines since the run began
    open_groups: frozenset[str]


def _controller_dies_with_streams_open(run: DemoRun) -> frozenset[str]:
    """Returns the prompt groups that were under way."""
    observer = run.observer
    moments: list[Moment] = []

    def struck() -> bool:
        with stopped(observer.pids[(r, 1)] for r in ROLLOUTS):
            pages = [_page(observer, r, 1) for r in ROLLOUTS]
            num_streams = sum(p.requests_active for p in pages)
            if num_streams < STREAMS_MIN:
                return False
            run.strike("controller-kill", "controller/0", 1)
            rows = observer.query(f"select group_id from ledger_groups where state in {OPEN}")
            moments.append(Moment(num_streams, sum(p.tokens for p in pages), frozenset(g for (g,) in rows)))
        return True

    eventually(struck, f"{STREAMS_MIN} streams to be open at once")
    (moment,) = moments
    assert len(moment.open_groups) * GROUP_SIZE >= moment.num_streams >= STREAMS_MIN

    def taken_over() -> list[dict[str, Any]]:
        return [m for m in observer.events("requests_reassigned") if m["from_replica"] == "controller/0"]

    eventually(taken_over, "the next controller to take over what the engines hold")
    (adopted,) = taken_over()
    assert adopted["num_requests"] >= moment.num_streams
    # Every token that an engine had made is in a trained step, in a dropped group, or was taken over.
    trained = sum(e["tokens"] for e in observer.events("step_committed") if e["seq"] < adopted["seq"])
    ((dropped,),) = observer.query("select coalesce(sum(num_tokens), 0) from ledger where state = 'dropped'")
    assert trained + dropped + adopted["tokens_kept"] >= moment.tokens_made
    _until_resolved(run, "controller/0", 1)
    return moment.open_groups


# --- a rollout, its replacement, and a trainer -----------------------------------------------------------------------


def _replacement_dies_while_it_starts_and_a_trainer_hangs_meanwhile(run: DemoRun) -> None:
    observer = run.observer
    standby = observer.pids[("standby/0", 1)]
    # It is stopped, so that its promotion is certainly in progress when it is killed.
    with stopped([standby]):
        run.strike("rollout-kill", "rollout/0", 1)
        eventually(lambda: observer.pids.get(("rollout/0", 2)) == standby, "the promotion to begin")
        assert observer.states[("rollout/0", 2)] == "starting"
        run.strike("rollout-kill", "rollout/0", 2)
    eventually(lambda: ("rollout/0", 3) in observer.states, "another replacement, from a cold start")
    hang = _trainer_hangs_in_a_read(run, "trainer/1")
    opened = _until_resolved(run, "rollout/0", 1)
    hung = _until_resolved(run, "trainer/1", 1)
    (closed,) = observer.events("incident_closed", opened["incident"])
    if hung["seq"] < closed["seq"]:
        # Both waited for the rollout, the standby for longer. It serves no request, so the trainer came first.
        (trainer_acted,) = observer.events("action_started", hung["incident"])
        assert all(e["seq"] > trainer_acted["seq"] for e in observer.events("action_started") if _about(e, "standby-0"))
    eventually(lambda: ("rollout/0", 3) in observer.serving, "the next poll of the observer")
    began, served = hang["injected_at"], observer.serving["rollout/0", 3]
    assert opened["at"] < began <= served.not_before, "the trainer hung while the rollout was in recovery"
    assert ("rollout/0", 2) not in observer.serving
    (failed,) = [e for e in observer.events("action_failed") if e["incident"] == opened["incident"]]
    assert failed["failure"] == "died"
    assert not [e for e in observer.events("replica_ready") if (e["replica"], e["incarnation"]) == ("rollout/0", 2)]


def _trainer_hangs_in_a_read(run: DemoRun, replica: str) -> dict[str, Any]:
    """Waits until the hang has begun, and checks that it lasts until the process is ended."""
    observer = run.observer
    pid = observer.pids[(replica, 1)]
    start = observer.start_ticks(pid)
    path = RunDir(run.path.resolve())
    threading.Thread(target=inject, args=(path, "trainer-hang", replica, "read"), daemon=True).start()
    begun = effect_path(path, pid, start)
    eventually(lambda: begun.exists() and _injected(run, "trainer-hang"), "the trainer to come to its read")
    page = _page(observer, replica, 1)
    work = Path(f"/proc/{pid}/task/{page.work_tid}/stat")
    samples: list[tuple[int, str]] = []

    def ended() -> bool:
        try:
            samples.append((_page(observer, replica, 1).progress, work.read_text().rpartition(")")[2].split()[0]))
        except (FileNotFoundError, ProcessLookupError):
            pass
        return not is_alive(pid, start)

    eventually(ended, "the hung trainer to be ended", seconds=RECOVERY_SECONDS)
    assert {progress for progress, _ in samples} == {page.progress}, "it continued working"
    states = [state for _, state in samples]
    assert len(states) > 10 and not {"T", "t"} & {*states}, "it was never stopped"
    # On its way into the read, and woken by the signal that ends it, it runs for a moment.
    assert {*states[1:-1]} <= {"S", "R", "Z", "X"} and states[1:-1].count("R") <= 1, f"it slept in its read: {states}"
    (record,) = _injected(run, "trainer-hang")
    return record


# --- a trainer in the middle of a pull -------------------------------------------------------------------------------


def _trainer_with_the_newest_weights_dies_during_a_pull(run: DemoRun) -> None:
    observer = run.observer
    path = RunDir(run.path.resolve())
    trainers = {r: max(i for q, i in observer.states if q == r) for r in ("trainer/0", "trainer/1")}
    asked: dict[str, tuple[Path, Path]] = {}
    for replica, incarnation in trainers.items():
        pid = observer.pids[(replica, incarnation)]
        start = observer.start_ticks(pid)
        request = InjectionRequest(request_id=f"pull-{replica}", how=InProcessFault.MEET, seconds=10.0, at=WEIGHTS)
        asked[replica] = request_path(path, pid, start), effect_path(path, pid, start)
        write_atomically(asked[replica][0], request.to_json())

    def met() -> list[str]:
        return [r for r, (_, effect) in asked.items() if effect.exists() and f"pull-{r}" in effect.read_text()]

    eventually(met, "a trainer to be in the middle of giving its weights")
    holder, *_ = met()
    pid = observer.pids[(holder, trainers[holder])]
    # All trainers are stopped: the next step would be committed between two of these reads.
    with stopped(observer.pids[member] for member in trainers.items()):
        newest = {r: _page(observer, r, i).policy_version for r, i in trainers.items()}
        pullers = _connected(observer, pid)
        versions = {r: _page(observer, r, i).policy_version for r, i in pullers}
        num_steps = len(observer.steps)
        run.strike("holder-kill", holder, trainers[holder])
    version = newest[holder]
    for request_file, _ in asked.values():
        request_file.unlink()
    assert pullers, "no rollout was connected to its weight port"
    assert all(v < version for v in versions.values()), (versions, version)
    assert version == max(newest.values())
    _until_resolved(run, holder, trainers[holder])

    def caught_up() -> bool:
        (newest, *_) = reversed(observer.events("step_committed"))
        return len(observer.steps) > num_steps and all(newest["versions"].get(r, -1) >= version for r in ROLLOUTS)

    eventually(caught_up, f"every rollout to have version {version} or a later one")


def _connected(observer: Observer, pid: int) -> list[tuple[str, int]]:
    """Rollouts with a connection to a port on which this process listens."""
    sockets = list(tcp_sockets())
    own = socket_inodes(pid)
    ports = {s.local.split(":")[1] for s in sockets if s.state == LISTEN and s.inode in own}
    to_it = {s.inode for s in sockets if s.state == ESTABLISHED and s.remote.split(":")[1] in ports}
    rollouts = {r: max(i for q, i in observer.states if q == r) for r in ROLLOUTS}
    return [(r, i) for r, i in rollouts.items() if socket_inodes(observer.pids[(r, i)]) & to_it]


# --- the end -----------------------------------------------------------------------------------------------------


def _down_removes_what_kill_9_left(run: DemoRun) -> None:
    raylets = [p for p in find_processes(run.path.resolve()) if p.name.startswith("raylet-")]
    assert len(raylets) == NUM_NODES
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    eventually(lambda: not any(is_alive(p.pid, p.start_ticks) for p in raylets), "the raylets to end with it")
    assert alive(run.observer) != []
    down = rolecall("down", str(run.path))
    assert down.returncode == 0, down.stderr
    eventually(lambda: alive(run.observer) == [], "all processes of the run to be gone")
    again = command("down", str(run.path))
    assert again.returncode == 0 and "ended 0" in again.stdout


# --- afterwards ------------------------------------------------------------------------------------------------------


def _nothing_was_lost(run: DemoRun, open_groups: frozenset[str]) -> None:
    audit = command("audit", str(run.path), "--json")
    found = json.loads(audit.stdout)
    assert audit.returncode == 0 and found["duplicates"] == 0, found
    newest = "select group_id, state, reason from ledger where seq in (select max(seq) from ledger group by group_id)"
    ended = {group: (state, reason) for group, state, reason in run.observer.query(newest)}
    fates = [ended[g] for g in open_groups]
    assert all(fate in (("trained", ""), ("dropped", TOO_STALE)) for fate in fates), fates
    assert ("trained", "") in fates
    report = json.loads(command("report", str(run.path), "--json").stdout)
    assert report["missed"] == []
    faults = [i for i in report["incidents"] if i["fault"]]
    assert all(i["diagnosed_correctly"] for i in faults), faults
    # The process that was killed under its new name may have been found under the one it had as a standby.
    by_kind = {i["fault"]["kind"]: i for i in faults if i["suspects"] != ["standby/0#1"]}
    assert list(by_kind) == ["controller-kill", "rollout-kill", "trainer-hang", "holder-kill"]
    assert all(i["outcome"] == "resolved" for i in by_kind.values()), faults
    controller = by_kind["controller-kill"]
    assert controller["tokens_lost"] == 0 < controller["tokens_kept"]
    # Killed by the observer, with the plain kill(2): its times are those that the report has.
    for incident in (controller, by_kind["holder-kill"]):
        detected_at = incident["fault"]["injected_at"] + incident["detected_seconds"]
        assert run.observer.opened[incident["incident_id"]].agrees(detected_at, AGREEMENT_SECONDS), incident
    assert report["pids_kept"] is True, report["pids"]
    steps = [
        s
        for (s,) in run.observer.query("select json_extract(body, '$.step') from events where kind = 'step_committed'")
    ]
    assert steps == list(range(len(steps))), "each step was committed once, in order"


def _until_resolved(run: DemoRun, replica: str, incarnation: int) -> dict[str, Any]:
    """Until the incident that first named this incarnation is closed as resolved. Returns how it was opened."""

    def opened() -> list[dict[str, Any]]:
        suspects = [(e, s) for e in run.observer.events("incident_opened") for s in e["diagnosis"]["suspects"]]
        return [e for e, s in suspects if (s["replica"], s["incarnation"]) == (replica, incarnation)]

    eventually(opened, f"an incident that names {replica}#{incarnation}:\n{run.output()[-2000:]}")
    (incident,) = opened()

    def closed() -> list[dict[str, Any]]:
        return run.observer.events("incident_closed", incident["incident"])

    eventually(closed, f"the end of {incident['incident']}:\n{run.output()[-3000:]}", seconds=RECOVERY_SECONDS)
    (end,) = closed()
    assert end["outcome"] == "resolved", end
    return incident


def _about(event: dict[str, Any], name: str) -> bool:
    return str(event["incident"]).endswith(name)


def _injected(run: DemoRun, kind: str) -> list[dict[str, Any]]:
    lines = (run.path / "injections.jsonl").read_text().splitlines()
    return [d for d in map(json.loads, lines) if d["kind"] == kind]


def _page(observer: Observer, replica: str, incarnation: int) -> PageState:
    """The state page of a process, read from its file."""
    pid = observer.pids[(replica, incarnation)]
    name = f"{pid}-{observer.start_ticks(pid)}.page"
    (path,) = observer.run_dir.glob(f"nodes/*/pages/{name}")
    reader = PageReader(path)
    try:
        deadline = time.monotonic() + 5
        while True:
            try:
                return reader.read()
            except PageUnreadable:
                assert time.monotonic() < deadline
    finally:
        reader.close()
