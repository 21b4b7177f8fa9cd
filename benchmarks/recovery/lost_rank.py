"""What does the loss of one rank cost, in replicas of several ranks?

    python -m benchmarks.recovery.lost_rank                 one run, every fault in turn; the report, about 15 minutes
    python -m benchmarks.recovery.lost_rank --repeat 3      three runs
    python -m benchmarks.recovery.lost_rank --standby       the trainers' faults with a warm standby of a trainer
    python -m benchmarks.recovery.lost_rank --report-only   the report again

A run of two trainers of two FSDP2 ranks and two tensor-parallel engines of two ranks, mode act. One further rank after
another is killed, or stopped and left so: at each stage of a trainer's step, in the copy for a checkpoint, in the copy
of the state that a replacement makes (then a rank of the replacement is lost), and in an engine step. The next fault
comes once the incident is closed and three more steps are committed. Times are from the journal, on one host: from the
finding to the next commit, and until the replacement serves. Each fault is a line of `results/lost_rank.jsonl`.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import until
from rolecall.core.clock import SystemClock
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import IncidentOpened, IncidentUpdated
from rolecall.core.membership import ReplicaState, is_standby
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.faults import injector
from rolecall.rl_runtime.faults.injector import InjectionTarget, _further_ranks, _Injection, _replicas
from rolecall.rl_runtime.faults.process_side import BACKWARD, BUCKET, COPY, ENGINE_STEP, MICROBATCH, SNAPSHOT, VOTE

LINES = common.RESULTS / "lost_rank.jsonl"
FAULTS = [
    *(("trainer", at, how) for at in (MICROBATCH, BACKWARD, BUCKET, VOTE, SNAPSHOT) for how in ("kill", "stop")),
    *(("rollout", ENGINE_STEP, how) for how in ("kill", "stop")),
    *(("trainer", COPY, how) for how in ("kill", "stop")),
]
OF_STANDBYS = {("trainer", at) for at in (MICROBATCH, BACKWARD, BUCKET, VOTE, SNAPSHOT)}
KINDS = {"kill": "kill", "stop": "hang"}
BARS = {"commit": 3.0, "serving": 20.0}
STEPS_BETWEEN = 3
START_SECONDS, FAULT_SECONDS, END_SECONDS = 400.0, 240.0, 60.0
STOP_SECONDS_MAX = 200.0
injector.MEET_SECONDS = 120.0  # a replacement reaches its copy only when it has started
JOB = """
name: ranks
seed: {seed}
num_steps: 100000
injection_allowed: true
roles: {{trainer: 2, rollout: 2, reward: 1}}
checkpoint: {{every_steps: 3}}
runtime: {{trainer_ranks: 2, rollout_ranks: 2, standbys: 0, trainer_standbys: {standbys}, startup_timeout_seconds: 400}}
recovery: {{mode: act, evictions_per_hour_max: 60, retries_per_replica_max: 20}}
"""


def times_of(run: RunDir, kind: EventKind, after: float) -> list[float]:
    with closing(Journal(run.database_url, create=False)) as journal:
        return [e.wall_at for e in journal.events() if e.kind is kind and e.wall_at > after]


def one_fault(run: RunDir, role: str, at: str, how: str) -> dict[str, Any]:
    """Injects it into a further rank of the last replica, waits for its end, and measures. Standbys are warm before."""
    until("warm standbys", FAULT_SECONDS, lambda: standbys_are_warm(run) or None)
    target = further_rank(run, role)
    if at == COPY:
        _Injection(run, "trainer-kill", "", "kill", STOP_SECONDS_MAX, SystemClock()).perform([target])
        target = until("the replacement's rank", FAULT_SECONDS, partial(successor, run, target))
    injection = _Injection(run, f"{role}-{KINDS[how]}", at, how, STOP_SECONDS_MAX, SystemClock())
    record = injection.perform([target])  # of a stop: returns when the target has been ended
    begun = record["injected_at"]

    def closed() -> dict[str, Any] | None:
        with closing(Journal(run.database_url, create=False)) as journal:
            events = [e for e in journal.events() if e.wall_at > begun]
        # A lost copy is found while the incident of the rank lost before it is open.
        findings = [(e, e.payload) for e in events if isinstance(e.payload, IncidentOpened | IncidentUpdated)]
        lost = f"incarnation {target.incarnation})"
        found = next(((e, said.diagnosis) for e, said in findings if lost in said.diagnosis.because), None)
        if found is None:
            return None
        opened, diagnosis = found
        own = {e.kind: e.wall_at for e in events if e.incident_id == opened.incident_id}
        if EventKind.INCIDENT_CLOSED not in own:
            return None
        suspect = diagnosis.suspects[0] if diagnosis.suspects else None
        found_at = diagnosis.detected_at
        replica, _, rank = target.target.partition(" rank ")
        served = [e.wall_at for e in events if e.kind is EventKind.EPOCH_ADVANCED and e.wall_at > found_at]
        ready = next((e.wall_at for e in events if e.kind is EventKind.REPLICA_READY and e.wall_at > found_at), None)
        commits = [e.wall_at for e in events if e.kind is EventKind.STEP_COMMITTED and e.wall_at > found_at]
        joined = next((t for t in served if ready is not None and t >= ready), None)
        return {
            "role": role,
            "at": at,
            "how": how,
            "met": record["met"],
            "named": suspect is not None and (suspect.replica, suspect.rank) == (replica, int(rank)),
            "fault": str(diagnosis.fault_class),
            "others": sum(e.kind is EventKind.INCIDENT_OPENED and e.incident_id != opened.incident_id for e in events),
            "found": found_at - begun,
            "commit": commits[0] - found_at if commits else None,
            "serving": joined - found_at if joined is not None else None,
            "verified": own.get(EventKind.INCIDENT_VERIFIED, float("nan")) - found_at,
        }

    line: dict[str, Any] = until(f"{role} {at} {how}: the incident's end", FAULT_SECONDS, closed)
    since = time.time()
    until(
        "further steps", FAULT_SECONDS, lambda: times_of(run, EventKind.STEP_COMMITTED, since)[STEPS_BETWEEN:] or None
    )
    return line


def standbys_are_warm(run: RunDir) -> bool:
    with closing(Journal(run.database_url, create=False)) as journal:
        current = journal.current()
        return all(
            r in current and current[r].incarnation == d.incarnation and current[r].state is ReplicaState.READY
            for r, d in journal.desired().items()
            if is_standby(r)
        )


def further_rank(run: RunDir, role: str) -> InjectionTarget:
    """Of the last replica of `role`, once all serve."""

    def found() -> InjectionTarget | None:
        targets = _replicas(run, role)
        further = [t for t in targets if " rank " in t.target and t.lives]
        return further[-1] if len(further) == 2 else None

    return until(f"a further rank of {role}", FAULT_SECONDS, found)  # type: ignore[no-any-return]


def successor(run: RunDir, lost: InjectionTarget) -> InjectionTarget | None:
    """The same rank of the next incarnation, as soon as its process runs."""
    replica = lost.target.partition(" rank ")[0]
    with closing(Journal(run.database_url, create=False)) as journal:
        record = journal.current().get(ReplicaId(replica))
    if record is None or record.incarnation == lost.incarnation:
        return None
    first = InjectionTarget(target=replica, pid=0, start_ticks=0, node=record.node, incarnation=record.incarnation)
    return next((t for t in _further_ranks(run, [first]) if t.lives), None)


def one_run(seed: int, standbys: int) -> None:
    name = f"bench-ranks-{int(time.time())}"
    process = common.start_run(name, JOB.format(seed=seed, standbys=standbys))
    run, measured = RunDir(common.RUNS / name), common.commit()
    try:

        def steps() -> bool | None:
            if process.poll() is not None:
                raise SystemExit(f"the run ended early: see {common.RUNS / name}.log")
            path = run.path / "journal.db"
            return True if path.exists() and times_of(run, EventKind.STEP_COMMITTED, 0.0)[10:] else None

        until("ten steps", START_SECONDS, steps)
        for role, at, how in FAULTS:
            if standbys and (role, at) not in OF_STANDBYS:
                continue
            try:
                found = one_fault(run, role, at, how)
            except TimeoutError as e:
                found = {"role": role, "at": at, "how": how, "named": False, "others": 0, "failure": str(e)}
            line = {"commit_of": measured, "seed": seed, "standbys": standbys, **found}
            print(line, flush=True)
            common.add_line(LINES, line)
    finally:
        process.terminate()
        process.wait(END_SECONDS)


def report(lines: Sequence[dict[str, Any]], measured: str) -> list[str]:
    seeds = sorted({line["seed"] for line in lines})
    text = common.header(
        "Loss of one rank, replicas of two ranks",
        "2 trainers x 2 FSDP2 ranks (gloo), 2 engines x 2 tensor-parallel ranks, 0.9 M parameters, no rollout standby",
        f"{', '.join(map(str, seeds))}; n = {len(lines)} faults",
        measured,
    )
    text += [
        "Seconds. Bars: the step commits within 3 s of the finding, the replica serves again within 20 s of it.",
        "",
        "| role | standbys | at | how | n | named | found after | commit after finding | serving after finding |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for standbys, (role, at, how) in product((0, 1), FAULTS):
        group = [x for x in lines if (x["standbys"], x["role"], x["at"], x["how"]) == (standbys, role, at, how)]
        if group:
            cells = [
                common.summary([x[key] for x in group if x.get(key) is not None], 1)
                for key in ("found", "commit", "serving")
            ]
            named = sum(x["named"] for x in group)
            text.append(f"| {role} | {standbys} | {at} | {how} | {len(group)} | {named} | {' | '.join(cells)} |")
    for standbys, (key, bar) in product((0, 1), BARS.items()):
        trainers = [x for x in lines if x["role"] == "trainer" and x["standbys"] == standbys]
        values = [x[key] for x in trainers if x.get(key) is not None]
        if values:
            of_bar = f"{sum(v <= bar for v in values)} of {len(trainers)} within {bar:g} s"
            text += ["", f"Trainers, {standbys} standbys, {key}: {of_bar}, median {statistics.median(values):.1f}."]
    others = sum(x["others"] for x in lines)
    text += [line for x in lines if "failure" in x for line in ("", f"Failed: {x['failure']}.")]
    return [*text, "", f"Further incidents beside those of the faults: {others}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    if not options.report_only:
        for seed in range(options.repeat):
            one_run(seed, int(options.standby))
    lines = common.read_lines(LINES)
    newest = {x["standbys"]: x["commit_of"] for x in lines}  # with and without standbys are separate runs
    lines = [x for x in lines if x["commit_of"] == newest[x["standbys"]]]
    path: Path = common.write("lost_rank", report(lines, ", ".join(dict.fromkeys(newest.values()))))
    print(path)


if __name__ == "__main__":
    main()
