"""How soon does a trainer that has lost its node train on the node of a rollout, and do the other rollouts go on?

    python -m benchmarks.recovery.borrowed_node                 a run of four lost nodes, about 8 minutes
    python -m benchmarks.recovery.borrowed_node --seed 1        another one; each loss is a line as soon as it is over
    python -m benchmarks.recovery.borrowed_node --report-only   the report again

No replica has a standby, and the nodes without a replica are in quarantine. The raylet of a trainer's node is killed,
and with it every process there. A rollout of the policy's choice lends its node; once the trainer is a member of the
epoch there, with its peers' state, a node is returned, so that the lender runs again, and the next node is lost. Times
are from the journal and the injector, on one host. Each loss is a line of `results/borrowed_node.jsonl`.

Tokens are read from the state pages of the rollouts that lend nothing, from the loss until the trainer trains, in
windows of `WINDOW_SECONDS`, or of 2.5 steps if those take longer: once a step they all load new weights.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

from benchmarks import common
from benchmarks.common import until
from benchmarks.recovery.warm_standby import events_after
from rolecall.core.errors import InjectionRefused, JournalError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import IncidentOpened, NodeLent
from rolecall.core.journal.payloads.run import EpochAdvanced, RequestsReassigned
from rolecall.core.membership import ReplicaState
from rolecall.core.nodes import quarantined_nodes
from rolecall.core.rundir import RunDir
from rolecall.recovery.operators.commands import quarantine, return_node
from rolecall.rl_runtime.faults.injector import inject
from rolecall.testing.token_counter import TokenCounter

LINES = common.RESULTS / "borrowed_node.jsonl"
BAR_SECONDS = 20.0
LOSSES, TRAINERS, ROLLOUTS = 4, 2, 3
STEPS_BETWEEN = 3
START_SECONDS, LOSS_SECONDS, END_SECONDS = 400.0, 240.0, 60.0
WINDOW_SECONDS, WINDOW_STEPS = 3.0, 2.5
JOB = """
name: borrowed-node
seed: {seed}
num_steps: 100000
injection_allowed: true
roles: {{trainer: {trainers}, rollout: {rollouts}, reward: 1}}
runtime: {{nodes: {nodes}, standbys: 0, trainer_standbys: 0, startup_timeout_seconds: 400, staleness_max: 8}}
algorithm: {{learning_rate: 1.0e-4}}
recovery: {{mode: act, evictions_per_hour_max: 1000, retries_per_replica_max: 1000}}
"""
OPERATOR = "benchmark"


def all_serve(run: RunDir) -> dict[str, str] | None:
    """Node of each replica, if every one serves; None: not yet."""
    try:
        with closing(Journal(run.database_url, create=False)) as journal:
            desired, current = journal.desired(), journal.current()
    except (JournalError, OSError):
        return None  # the run is being created
    for replica, wanted in desired.items():
        actual = current.get(replica)
        if actual is None or actual.incarnation != wanted.incarnation or actual.state is not ReplicaState.SERVING:
            return None
    return {replica: actual.node for replica, actual in current.items()} or None


def kept_back(run: RunDir) -> list[str]:
    """Nodes in quarantine."""
    with closing(Journal(run.database_url, create=False)) as journal:
        return sorted(quarantined_nodes(journal))


def one_loss(run: RunDir, rng: random.Random) -> dict[str, Any]:
    """A trainer's node is lost; waits until its incident is closed, then until the lender is back."""
    nodes = until("all serve", LOSS_SECONDS, lambda: all_serve(run))
    since = time.time()

    def steps() -> list[float] | None:
        at = [e.wall_at for e in events_after(run, since) if e.kind is EventKind.STEP_COMMITTED]
        return at if len(at) > STEPS_BETWEEN else None

    counter = TokenCounter(run)
    with counter.counting():
        times = until("further steps", LOSS_SECONDS, steps)
        step_seconds = statistics.median(later - earlier for earlier, later in pairwise(times))
        target = f"trainer/{rng.randrange(TRAINERS)}"
        lost_at = float(inject(run, "node-kill", nodes[target])["injected_at"])
        found = until(
            f"{target} on another node", LOSS_SECONDS, lambda: measured(events_after(run, lost_at), target, lost_at)
        )
    window = max(WINDOW_SECONDS, WINDOW_STEPS * step_seconds)
    others = [r for r in nodes if r.startswith("rollout/") and r != found["lender"]]
    rates = counter.rates(others, lost_at, lost_at + found["from_loss"], min(window, found["from_loss"] - 1.0))
    before = counter.rates(others, since, lost_at, (lost_at - since) / 2)
    return_node(run, kept_back(run)[0], OPERATOR, "the lender runs again there")
    return {
        **found,
        "step": step_seconds,
        "window": window,
        "tokens_before": before[0] if before else None,
        "tokens_least": min(rates, default=None),
    }


def measured(events: Sequence[Event], target: str, lost_at: float) -> dict[str, Any] | None:
    """Times of one loss, in seconds; None: the trainer is not back yet. `events`: those after the loss."""
    lent = next((e.as_(NodeLent) for e in events if e.kind is EventKind.NODE_LENT), None)
    incidents = [e for e in events if e.kind is EventKind.INCIDENT_OPENED]
    back_at = next((e.wall_at for e in events if lent is not None and _is_back(e, target, lost_at, events)), None)
    if lent is None or back_at is None or not incidents:
        return None
    suspects = {s.replica for e in incidents for s in e.as_(IncidentOpened).diagnosis.suspects}
    found_at = incidents[0].wall_at
    moved = [e.as_(RequestsReassigned) for e in events if e.kind is EventKind.REQUESTS_REASSIGNED]
    return {
        "lender": lent.replica,
        "named": suspects <= {target, ""},
        "found": found_at - lost_at,
        "from_finding": back_at - found_at,
        "from_loss": back_at - lost_at,
        "tokens_lost": sum(m.tokens_lost for m in moved if m.from_replica == lent.replica),
    }


def _is_back(event: Event, target: str, lost_at: float, events: Sequence[Event]) -> bool:
    """Whether the event's epoch has the trainer again, after one that had it not."""
    if event.kind is not EventKind.EPOCH_ADVANCED:
        return False
    epochs = [e for e in events if e.kind is EventKind.EPOCH_ADVANCED and lost_at < e.wall_at < event.wall_at]
    return _has(event, target) and any(not _has(e, target) for e in epochs)


def _has(event: Event, target: str) -> bool:
    return any(replica == target for replica, _ in event.as_(EpochAdvanced).members)


def one_run(seed: int, losses: int) -> None:
    name = f"bench-borrowed-{int(time.time())}"
    used = 1 + TRAINERS + ROLLOUTS
    text = JOB.format(seed=seed, trainers=TRAINERS, rollouts=ROLLOUTS, nodes=used + losses)
    process = common.start_run(name, text)
    run, rng, of_commit = RunDir(common.RUNS / name), random.Random(f"borrowed-{seed}"), common.commit()
    try:
        nodes = until("the start", START_SECONDS, lambda: all_serve(run))
        for node in sorted({f"node-{n}" for n in range(used + losses)} - {"node-0", *nodes.values()}):
            quarantine(run, node, OPERATOR, "it is kept back")
        for _ in range(losses):
            try:
                found = one_loss(run, rng)
            except (TimeoutError, InjectionRefused) as e:
                found = {"failure": str(e)}
            line = {"commit": of_commit, "seed": seed, **found}
            print(line, flush=True)
            common.add_line(LINES, line)
            if "failure" in found or process.poll() is not None:
                raise SystemExit(f"the run ended early: see {common.RUNS / name}.log")
    finally:
        process.terminate()
        process.wait(END_SECONDS)


def report(lines: Sequence[dict[str, Any]], of_commit: str) -> list[str]:
    seeds = ", ".join(str(s) for s in sorted({x["seed"] for x in lines}))
    done = [x for x in lines if "failure" not in x]
    text = common.header(
        "A trainer trains on the node of a rollout",
        f"{TRAINERS} trainers, {ROLLOUTS} rollouts, no standby, no free node, 0.9 M parameters",
        f"{seeds}; n = {len(lines)} lost nodes",
        of_commit,
    )
    text += [
        f"- steps of {common.summary([x['step'] for x in done])} s",
        f"- only the lost trainer named: {sum(x['named'] for x in done)} of {len(lines)}",
        f"- tokens of the lender's requests lost: {sum(x['tokens_lost'] for x in done)}",
        "",
        "Seconds.",
        "",
    ]
    rows = []
    for key, what, bar in (
        ("found", "found after the loss", ""),
        ("from_finding", "trains again after the finding", f"{BAR_SECONDS:g}"),
        ("from_loss", "trains again after the loss", ""),
    ):
        if values := [x[key] for x in done]:
            cells = [statistics.median(values), common.quantile(values, 0.9), max(values)]
            rows.append([what, str(len(values)), *(f"{c:.1f}" for c in cells), bar])
    text += common.table(("measure", "n", "median", "P90", "worst", "bar"), rows)
    text += ["Tokens a second of the rollouts that lend nothing, together.", ""]
    rows = []
    for number, x in enumerate(done):
        before, least = (f"{x[k]:.0f}" if x[k] is not None else "-" for k in ("tokens_before", "tokens_least"))
        rows.append([str(number), x["lender"], before, least, f"{x['window']:.1f}"])
    text += common.table(("loss", "lender", "before the loss", "least until the trainer trains", "window, s"), rows)
    return text + [line for x in lines if "failure" in x for line in ("", f"Failed: {x['failure']}.")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=LOSSES, help="of a trainer's node, in one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    if not options.report_only:
        one_run(options.seed, options.losses)
    lines = common.read_lines(LINES)
    newest = lines[-1]["commit"]
    print(common.write("borrowed_node", report([x for x in lines if x["commit"] == newest], newest)))


if __name__ == "__main__":
    main()
