"""How soon does a warm standby do the work of a replica that was killed?

    python -m benchmarks.recovery.warm_standby                 20 kills of each role, about 30 minutes
    python -m benchmarks.recovery.warm_standby --kills 100     more; each kill is a line as soon as it is over
    python -m benchmarks.recovery.warm_standby --report-only   the report again

Trainers and rollouts are killed in turn, at a random moment, each time once every replica serves, both standbys are
warm, and two more steps are committed. Times are from the journal and the injector, on one host, until the replacement
is a member of the epoch: a rollout has then proven its weights and serves, a trainer has its peers' state. Each kill is
a line of `results/warm_standby.jsonl`.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from benchmarks import common
from benchmarks.common import until
from rolecall.core.errors import InjectionRefused, JournalError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import IncidentOpened
from rolecall.core.journal.payloads.run import EpochAdvanced
from rolecall.core.membership import ReplicaState, is_standby
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.faults.injector import inject

LINES = common.RESULTS / "warm_standby.jsonl"
BARS = {"rollout": ("from_kill", 1.0, 2.0), "trainer": ("from_finding", 3.0, None)}
"""By role: the measure, the bar of its median, and that of its P99."""
STEPS_BETWEEN = 2
START_SECONDS, FAULT_SECONDS, END_SECONDS = 400.0, 180.0, 60.0
PAUSE_SECONDS_MAX = 2.0
"""A kill comes at a random moment within so long."""
JOB = """
name: warm-standby
seed: {seed}
num_steps: 100000
injection_allowed: true
roles: {{trainer: 2, rollout: 2, reward: 1}}
runtime: {{nodes: 7, standbys: 1, trainer_standbys: 1, startup_timeout_seconds: 400}}
recovery: {{mode: act, evictions_per_hour_max: 1000, retries_per_replica_max: 1000}}
"""


def events_after(run: RunDir, at: float) -> list[Event]:
    with closing(Journal(run.database_url, create=False)) as journal:
        return [e for e in journal.events() if e.wall_at > at]


def all_at_work(run: RunDir) -> bool | None:
    """Every replica serves and every standby is warm; None: not yet."""
    try:
        with closing(Journal(run.database_url, create=False)) as journal:
            desired, current = journal.desired(), journal.current()
    except (JournalError, OSError):
        return None  # the run is being created
    for replica, wanted in desired.items():
        state = ReplicaState.READY if is_standby(replica) else ReplicaState.SERVING
        actual = current.get(replica)
        if actual is None or actual.incarnation != wanted.incarnation or actual.state is not state:
            return None
    return True if desired else None


def one_kill(run: RunDir, role: str, rng: random.Random) -> dict[str, Any]:
    """Kills a replica and waits until its incident is closed."""
    since = time.time()
    until("all at work", FAULT_SECONDS, lambda: all_at_work(run))

    def steps() -> bool | None:
        return sum(e.kind is EventKind.STEP_COMMITTED for e in events_after(run, since)) >= STEPS_BETWEEN or None

    until("further steps", FAULT_SECONDS, steps)
    time.sleep(PAUSE_SECONDS_MAX * rng.random())
    target = f"{role}/{rng.randrange(2)}"
    record = inject(run, f"{role}-kill", target)
    killed_at = float(record["injected_at"])

    def closed() -> dict[str, Any] | None:
        events = events_after(run, killed_at)
        return measured(events, target, killed_at)

    return {"role": role, **until(f"the incident of {target}", FAULT_SECONDS, closed)}


def measured(events: Sequence[Event], target: str, killed_at: float) -> dict[str, Any] | None:
    """Times of one kill, in seconds; None: its incident is not closed yet. `events`: those after the kill."""
    opened = next((e for e in events if e.kind is EventKind.INCIDENT_OPENED), None)
    if opened is None or not any(
        e.kind is EventKind.INCIDENT_CLOSED and e.incident_id == opened.incident_id for e in events
    ):
        return None
    found_at, suspects = opened.wall_at, opened.as_(IncidentOpened).diagnosis.suspects
    named = bool(suspects) and suspects[0].replica == target
    rejoined = next((e.wall_at for e in events if named and _is_member(e, target, suspects[0].incarnation)), None)
    return {
        "named": named,
        "found": found_at - killed_at,
        "from_finding": None if rejoined is None else rejoined - found_at,
        "from_kill": None if rejoined is None else rejoined - killed_at,
    }


def _is_member(event: Event, target: str, killed: int | None) -> bool:
    """Whether an incarnation of the replica newer than the killed one is in the event's epoch."""
    if event.kind is not EventKind.EPOCH_ADVANCED:
        return False
    members = event.as_(EpochAdvanced).members
    return any(replica == target and incarnation > (killed or 0) for replica, incarnation in members)


def one_run(seed: int, num_kills: int) -> None:
    name = f"bench-warm-{int(time.time())}"
    process = common.start_run(name, JOB.format(seed=seed))
    run, rng, of_commit = RunDir(common.RUNS / name), random.Random(f"warm-{seed}"), common.commit()
    try:
        until("the start", START_SECONDS, lambda: all_at_work(run))
        for number in range(2 * num_kills):
            role = ("rollout", "trainer")[number % 2]
            try:
                found = one_kill(run, role, rng)
            except (TimeoutError, InjectionRefused) as e:
                found = {"role": role, "failure": str(e)}
            line = {"commit": of_commit, "seed": seed, **found}
            print(line, flush=True)
            common.add_line(LINES, line)
            if process.poll() is not None:
                raise SystemExit(f"the run ended early: see {common.RUNS / name}.log")
    finally:
        process.terminate()
        process.wait(END_SECONDS)


def report(lines: Sequence[dict[str, Any]], of_commit: str) -> list[str]:
    seeds = ", ".join(str(s) for s in sorted({x["seed"] for x in lines}))
    text = common.header(
        "A killed replica's work by a warm standby",
        "2 trainers, 2 rollouts, one warm standby of each, 0.9 M parameters",
        f"{seeds}; n = {len(lines)} kills",
        of_commit,
    )
    text += ["Seconds.", "", "| killed | n | named | measure | median | P90 | P99 | worst | bar |", "|---" * 9 + "|"]
    for role, (measure, bar, bar_p99) in BARS.items():
        group = [x for x in lines if x["role"] == role]
        named = sum(bool(x.get("named")) for x in group)
        for key, what in (("found", "found after the kill"), ("from_finding", "at work after the finding"),
                          ("from_kill", "at work after the kill")):  # fmt: skip
            values = [x[key] for x in group if x.get(key) is not None]
            if not values:
                continue
            cells = [
                statistics.median(values),
                common.quantile(values, 0.9),
                common.quantile(values, 0.99),
                max(values),
            ]
            told = f"median {bar:g}{f', P99 {bar_p99:g}' if bar_p99 else ''}" if key == measure else ""
            text.append(
                f"| {role} | {len(values)} | {named} of {len(group)} | {what} | "
                f"{' | '.join(f'{c:.2f}' for c in cells)} | {told} |"
            )
    return text + [line for x in lines if "failure" in x for line in ("", f"Failed: {x['role']}: {x['failure']}.")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each role")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    if not options.report_only:
        one_run(options.seed, options.kills)
    lines = common.read_lines(LINES)
    newest = lines[-1]["commit"]
    print(common.write("warm_standby", report([x for x in lines if x["commit"] == newest], newest)))


if __name__ == "__main__":
    main()
