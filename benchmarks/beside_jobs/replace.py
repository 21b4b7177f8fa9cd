"""Replicas of a job that rolecall did not start are replaced: how often, how fast, and is anything else touched?

    python -m benchmarks.beside_jobs.replace processes ray
    PYTHONPATH=FOLDER python -m benchmarks.beside_jobs.replace torchft   FOLDER: with torchft's packages
    python -m benchmarks.beside_jobs.replace slurm                       as root, with Debian's slurm-wlm and munge

A job of four replicas, each one process that a shell starts again when it ends; an agent and a watch in mode act
beside it. Faults come one after the other, each in a replica of the seed's choice: `stop` (SIGSTOP) and `lock` (its
main thread waits at a lock for ever).

torchft: every replica has torchft's real manager and takes part in the quorum of a real lighthouse, which is asked to
end the group; if it has left the quorum, its process is ended. ray: the replicas are actors of a local Ray cluster,
which starts them again. slurm: every replica is a Slurm job of its own, on a real Slurm of three nodes, all of them
this machine; its job is requeued.

A case is right if its incident is resolved, names that replica, and no other replica has another PID than before. Each
is a line of `results/replace.jsonl`, with the number of incidents that were tolerated beside it; the report has, of
each target, the lines of the newest commit.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import common
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import CallStarted, IncidentClosed, IncidentOpened, IncidentVerified
from rolecall.testing.slurm_cluster import SlurmCluster, SlurmJobs, slurm_version
from rolecall.testing.watched_job import STEPS, WatchedJob

LINES = common.RESULTS / "replace.jsonl"
TARGETS = ("processes", "ray", "slurm", "torchft")
REPLICAS = tuple(f"rollout/{n}" for n in range(4))
START_SECONDS, CASE_SECONDS = 120.0, 180.0
REST_SECONDS = 5.0
"""Between two faults: the replacement makes progress, and its deadlines are known."""
CONFIG = """
recovery: {{mode: act, evictions_per_hour_max: 1000, retries_per_replica_max: 100, verification_timeout_seconds: 60}}
actuator: {actuator}
roles: [rollout]
"""
LIGHTHOUSE = """
import sys, threading
from torchft._torchft import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=2000)
port = server.address().rpartition(":")[2]
with open(sys.argv[1] + ".new", "w") as f:
    f.write(f"http://127.0.0.1:{port}")
import os
os.rename(sys.argv[1] + ".new", sys.argv[1])
threading.Event().wait()
"""
MEMBER = """
import os, uuid
from datetime import timedelta
from torchft._torchft import ManagerClient, ManagerServer
second = timedelta(seconds=1)
name = os.environ["ROLECALL_REPLICA"].replace("/", "_") + ":" + str(uuid.uuid4())
server = ManagerServer(
    replica_id=name, lighthouse_addr=os.environ["LIGHTHOUSE"], hostname="127.0.0.1", bind="127.0.0.1:0",
    store_addr="127.0.0.1:1", world_size=1, heartbeat_interval=0.2 * second, connect_timeout=10 * second,
    quorum_retries=0,
)
client = ManagerClient("http://127.0.0.1:" + server.address().rpartition(":")[2], connect_timeout=10 * second)
def quorum(step):
    try:
        client._quorum(
            group_rank=0, step=step, checkpoint_metadata="", shrink_only=False, timeout=20 * second, commit_failures=0,
            reconfigure_handle="", init_sync=True,
        )
    except (RuntimeError, TimeoutError):
        pass  # a member left meanwhile
"""
"""Before the steps of a member of torchft's quorum."""
RAY = """
import os, signal, sys
import ray
names, code, library, seconds = sys.argv[1].split(","), sys.argv[2], sys.argv[3], float(sys.argv[4])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
ray.init(address="local", num_cpus=len(names), include_dashboard=False, log_to_driver=False)
@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Engine:
    def run(self):
        exec(code, {})
def environment(name):
    mine = {"ROLECALL_REPLICA": name, "ROLECALL_ROLE": name.partition("/")[0], "ROLECALL_RANK": "0"}
    return {"env_vars": {**mine, "ROLECALL_AGENT_DIR": os.environ["ROLECALL_AGENT_DIR"], "PYTHONPATH": library}}
ray.get([Engine.options(runtime_env=environment(name)).remote().run.remote() for name in names], timeout=seconds)
"""
"""A job of Ray: actors that it starts again, with their task. Arguments: replicas, their code, PYTHONPATH, and the
seconds after which it ends by itself."""


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    replica: str
    fault: str


def cases(target: str, seed: int, number: int) -> Iterator[Case]:
    rng = random.Random(f"replace-{target}-{seed}")
    for n in range(number):
        yield Case(n, rng.choice(REPLICAS), ("stop", "lock")[n % 2])


def actuator(target: str, lighthouse: str) -> str:
    processes = {"kind": "processes", "program": [sys.executable, "-m", "rolecall"]}
    if target == "torchft":
        groups = {"rollout": "rollout_{index}"}
        return json.dumps({"kind": "torchft", "url": lighthouse, "groups": groups, "processes": processes})
    return json.dumps({"kind": "slurm"} if target == "slurm" else processes)


def run(target: str, seed: int, wanted: Sequence[Case], stack: ExitStack) -> Iterator[dict[str, Any]]:
    """Runs the cases in one job; yields a line for each."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolecall-replace-")))
    lighthouse, code = "", STEPS
    if target == "torchft":
        told = folder / "lighthouse"
        log = stack.enter_context((folder / "lighthouse.log").open("wb"))
        process = subprocess.Popen([sys.executable, "-c", LIGHTHOUSE, str(told)], stdout=log, stderr=log)
        stack.callback(process.wait, START_SECONDS)
        stack.callback(process.kill)
        common.until("the lighthouse serves", START_SECONDS, lambda: told.exists() or None)
        lighthouse, code = told.read_text(), MEMBER + STEPS.replace("time.sleep(0.02)", "quorum(n); time.sleep(0.02)")
    if target == "slurm":
        cluster = SlurmCluster(folder / "slurm", num_nodes=3)
        stack.callback(cluster.close)
        cluster.start()
        job: WatchedJob = SlurmJobs(folder / "job", cluster, REPLICAS)
    else:
        job = WatchedJob(folder / "job", REPLICAS, code, {"LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"})
    stack.callback(job.close)
    job.start_agent()
    common.until("the agent serves", START_SECONDS, lambda: job.agent_url or None)
    if target == "ray":
        seconds = 4 * START_SECONDS + len(wanted) * (REST_SECONDS + 2 * CASE_SECONDS)  # more than all waits below
        job.start([sys.executable, "-c", RAY, ",".join(REPLICAS), STEPS, str(common.ROOT), str(seconds)])
    else:
        job.start_replicas()
    job.start_watch(CONFIG.format(actuator=actuator(target, lighthouse)))
    common.until("all replicas are counted", START_SECONDS, lambda: len(job.pids()) == len(REPLICAS) or None)
    common.until("deadlines are learned", START_SECONDS, lambda: job.has_learned or None)
    for case in wanted:
        time.sleep(REST_SECONDS)
        common.until("its process is the one that runs", CASE_SECONDS, partial(_runs, job, case.replica))
        before, num_over = job.pids(), len(_over(job))
        began = time.time()
        os.kill(before[case.replica][1], signal.SIGSTOP if case.fault == "stop" else signal.SIGUSR1)
        deadline = time.monotonic() + CASE_SECONDS
        while len(_over(job)) == num_over and time.monotonic() < deadline:
            time.sleep(0.2)
        yield {"fault": case.fault, "number": case.number, "replica": case.replica} | judged(
            case, began, before, job.pids(), [e for kind in KINDS for e in job.events(kind)]
        )


def _runs(job: WatchedJob, replica: str) -> bool | None:
    _, pid = job.pids().get(replica, (0, 0))
    return True if pid and Path(f"/proc/{pid}").exists() else None


def _over(job: WatchedJob) -> list[Event]:
    """Closes of incidents that needed an action. One that is tolerated, as a slow replica, is beside the point."""
    closed = job.events(EventKind.INCIDENT_CLOSED)
    return [e for e in closed if e.as_(IncidentClosed).outcome != "tolerated"]


KINDS = (
    EventKind.INCIDENT_OPENED,
    EventKind.CALL_STARTED,
    EventKind.INCIDENT_VERIFIED,
    EventKind.INCIDENT_CLOSED,
)


def judged(
    case: Case,
    began: float,
    before: dict[str, tuple[int, int]],
    after: dict[str, tuple[int, int]],
    events: Sequence[Event],
) -> dict[str, Any]:
    """`before`, `after`: replica -> (incarnation, PID). `events`: of incidents; those before `began` are left out."""
    since = [e for e in events if e.wall_at >= began]
    beside = {e.incident_id for e in since if getattr(e.payload, "outcome", "") == "tolerated"}
    since = [e for e in since if e.incident_id not in beside]
    opened = [e for e in since if isinstance(e.payload, IncidentOpened)]
    verified = [e for e in since if isinstance(e.payload, IncidentVerified)]
    closed = [e for e in since if isinstance(e.payload, IncidentClosed)]
    named = sorted({s.replica for e in opened for s in e.as_(IncidentOpened).diagnosis.suspects})
    others = sorted(r for r in before if r != case.replica and before[r] != after.get(r))
    outcome = closed[0].as_(IncidentClosed) if closed else None
    right = outcome is not None and outcome.outcome == "resolved" and named == [case.replica] and not others
    return {
        "right": right and after[case.replica][1] != before[case.replica][1],
        "named": named,
        "others_touched": others,
        "tolerated_beside": len(beside),
        "outcome": outcome.outcome if outcome else "not closed",
        "because": "" if right else (outcome.because if outcome else ""),
        "found_seconds": round(opened[0].wall_at - began, 2) if opened else None,
        "verified_seconds": round(verified[0].wall_at - began, 2) if verified else None,
        "how": [e.as_(CallStarted).words for e in since if isinstance(e.payload, CallStarted)],
    }


def report(lines: Sequence[dict[str, Any]], of_commit: str) -> list[str]:
    seeds = ", ".join(str(s) for s in sorted({x["seed"] for x in lines}))
    versions = ", ".join(sorted({x["version"] for x in lines if x["version"]}))
    about = f"{len(REPLICAS)} replicas of one process each, mode act{', ' if versions else ''}{versions}"
    text = common.header("Replicas of a watched job, replaced", about, seeds, of_commit)
    text += [
        "Seconds from the fault: median, worst. Right: resolved, the right replica named, no other one touched.",
        "",
        "| target | commit | fault | n | right | others touched | found | seen to work again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target, fault in sorted({(x["target"], x["fault"]) for x in lines}):
        group = [x for x in lines if (x["target"], x["fault"]) == (target, fault)]
        cells = []
        for key in ("found_seconds", "verified_seconds"):
            known = [x[key] for x in group if x[key] is not None]
            cells.append(f"{statistics.median(known):.1f}, {max(known):.1f}" if known else "-")
        touched = sum(len(x["others_touched"]) for x in group)
        right = sum(x["right"] for x in group)
        about = f"{target} | {group[0]['commit']} | {fault} | {len(group)} | {right} | {touched}"
        text.append(f"| {about} | {' | '.join(cells)} |")
    for x in lines:
        if not x["right"]:
            case = f"{x['target']} {x['fault']} {x['number']}"
            text += ["", f"Not right: {case}: {x['outcome']}, {x['named']}, {x['because']}"]
    return text


def version_of(target: str) -> str:
    if target == "slurm":
        return slurm_version()
    try:
        return f"torchft {version('torchft-nightly')}" if target == "torchft" else ""
    except PackageNotFoundError:
        return "torchft of unknown version"


def known_target(text: str) -> str:
    if text not in TARGETS:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(TARGETS)}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", type=known_target, help=f"{', '.join(TARGETS)}; none: the report again")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left running
    of_commit = common.commit()
    for target in options.targets:
        of_target = version_of(target)
        key = {"commit": of_commit, "target": target, "seed": options.seed, "version": of_target}
        with ExitStack() as stack:
            for line in run(target, options.seed, list(cases(target, options.seed, options.cases)), stack):
                common.add_line(LINES, key | line)
                print(target, line, flush=True)
    lines = common.read_lines(LINES)
    if not lines:
        print("no case was run")
        return 1
    newest = {x["target"]: x["commit"] for x in lines}
    shown = [x for x in lines if x["commit"] == newest[x["target"]]]
    print(common.write("replace", report(shown, ", ".join(sorted(set(newest.values()))))))
    return 0 if all(x["right"] for x in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
