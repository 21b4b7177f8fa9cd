"""A synthetic run: a whole run directory written through the real Journal and Ledger, on a fake clock.

Three faults (a rollout killed, a trainer hung, a rollout slowed), each found, replaced and verified, at known times:
audit, report and display are tested on it in milliseconds. `python -m tests.fake_run DIR` writes one.
"""

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rolecall.core.clock import FakeClock
from rolecall.core.config.job import parse_job
from rolecall.core.diagnosis import ActionKind, Diagnosis, Evidence, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import GroupId, IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import EventKind as K
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import GroupState, Ledger, LedgerLine
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.rundir import RunDir, create_run_dir
from tests.events import filled

HOMES = {
    "controller/0": "node-0",
    "reward/0": "node-0",
    "reward/1": "node-0",
    "trainer/0": "node-1",
    "trainer/1": "node-2",
    "rollout/0": "node-3",
    "rollout/1": "node-4",
    "rollout/2": "node-5",
    "standby/0": "node-6",
}
GROUPS_PER_STEP = 8
TRAINING_AT = 24.0
STEP_SECONDS = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault to come. Times are seconds after the run started."""

    kind: str
    how: str
    target: str
    at: float
    found_after: float
    because: str
    evidence: tuple[str, ...]
    fault_class: FaultClass
    serving_after: float  # finding -> the replacement serves
    verified_after: float  # finding -> it was seen to make progress

    @property
    def found_at(self) -> float:
        return self.at + self.found_after


KILL = Strike(
    kind="rollout-kill",
    how="",
    target="rollout/1",
    at=38.2,
    found_after=0.31,
    fault_class=FaultClass.CRASH,
    because="rollout/1 (node-4, pid 4105, incarnation 1) crashed: process exited on signal 9 in generate",
    evidence=("process 4105 on node-4 exited on signal 9", "last phase: generate, step 22"),
    serving_after=1.62,
    verified_after=2.05,
)
HANG = Strike(
    kind="trainer-hang",
    how="lock",
    target="trainer/1",
    at=57.4,
    found_after=3.1,
    fault_class=FaultClass.HANG,
    because="trainer/1 (node-2, incarnation 1) is hung: no progress in compute for 2.9 s (deadline 2.5 s); trainer/0 is "
    "waiting for it in reduce",
    evidence=("no progress for 2.9 s in compute", "trainer/0 entered collective 53, trainer/1 did not"),
    serving_after=8.9,
    verified_after=9.8,
)
SLOW = Strike(
    kind="rollout-slow",
    how="duty",
    target="rollout/0",
    at=80.5,
    found_after=13.8,
    fault_class=FaultClass.SLOW,
    because="rollout/0 (node-3, incarnation 1) is slow: 4.1 times the seconds per unit of 2 peers at equal load, for 13 s, "
    "CPU starvation excluded",
    evidence=("312 tokens per busy second, peers 1280 and 1264", "CPU wait: 1 % of the window"),
    serving_after=1.71,
    verified_after=3.2,
)
ALL = (KILL, HANG, SLOW)


@dataclass
class FakeRun:
    """Builds the directory. Everything that happens is put on an agenda first, then done in order of time."""

    root: Path
    run_id: str = "demo-7"
    seed: int = 7
    num_steps: int = 120
    strikes: Sequence[Strike] = ALL
    finish: bool = True
    peaks: Mapping[str, float] = field(default_factory=dict)  # `runtime` of the job file: peak FLOP/s
    run: RunDir = field(init=False)
    clock: FakeClock = field(init=False)
    journal: Journal = field(init=False)
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.run = create_run_dir(self.root, self.run_id)
        self.clock = FakeClock(now=1000.0)
        self.zero = self.clock.monotonic()
        self.journal = Journal(self.run.database_url, clock=self.clock)
        self.ledger = Ledger(self.journal.store, clock=self.clock)
        # Nobody pulls the plug on a run that never was: no wait for the disk with each of its thousand writes.
        sa.event.listen(self.journal.store.engine, "connect", lambda c, _: c.execute("PRAGMA synchronous=OFF"))
        self.journal.store.engine.dispose()
        self.rng = random.Random(self.seed)
        self.incarnation = dict.fromkeys(HOMES, 1)
        self.node = dict(HOMES)
        self.pid = {r: 4100 + n for n, r in enumerate(HOMES)}
        self.next_pid = 5200
        self.version = 0
        self.away: set[str] = set()  # rollouts that do not serve at the moment
        self.agenda: list[tuple[float, int, Callable[[], object]]] = []
        job = {
            "name": "demo",
            "seed": self.seed,
            "num_steps": self.num_steps,
            "injection_allowed": bool(self.strikes),
            "recovery": {"mode": "act", "horizon_seconds": 3600.0},
            "runtime": dict(self.peaks),
        }
        self.job = parse_job(job)

    @property
    def wall_zero(self) -> float:
        return self.zero + 1_700_000_000.0

    def at(self, seconds: float, do: Callable[[], object]) -> None:
        self.agenda.append((seconds, len(self.agenda), do))

    def build(self) -> RunDir:
        self._start()
        for strike in self.strikes:
            self._strike(strike)
        self._steps()
        for seconds, _, do in sorted(self.agenda, key=lambda a: a[:2]):
            self.clock.advance(self.zero + seconds - self.clock.monotonic())
            do()
        self.journal.close()
        return self.run

    # --- start and end ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        digest = self.job.digest()
        self.run.write({"run_id": self.run_id, "seed": self.seed, "config": self.job.model_dump(mode="json")})
        body = {"seed": self.seed, "config_digest": digest, "roles": self.job.roles.counts()}
        self.at(0.0, lambda: self.say(K.RUN_STARTED, body))
        for n, replica in enumerate(HOMES):
            self.at(1.0 + n * 0.4, lambda r=replica: self._starting(r))  # type: ignore[misc]
            slow = 18.0 if replica.startswith(("rollout", "standby")) else 8.0
            self.at(slow + n * 0.3, lambda r=replica: self._ready(r, from_standby=""))  # type: ignore[misc]
        self.at(TRAINING_AT - 1, lambda: self._epoch("all replicas have started"))
        for n in range(3):
            self.at(TRAINING_AT - 0.8 + n * 0.1, lambda r=f"rollout/{n}": self._admit(r))  # type: ignore[misc]

    def _end(self) -> None:
        for replica in HOMES:
            body = {"replica": replica, "incarnation": self.incarnation[replica], "because": "done"}
            self.say(K.REPLICA_STOPPED, body)
            self._actual(replica, ReplicaState.STOPPED)
        because = f"all {self.num_steps} steps are committed"
        head = self.ledger.head()
        last_word = {
            "outcome": "completed",
            "because": because,
            "ledger": {"position": head.position, "hash": head.hash},
        }
        self.journal.set_flag("done", json.dumps(last_word))
        self.say(K.RUN_ENDED, {"outcome": "completed", "because": because})

    # --- work ---------------------------------------------------------------------------------------------------

    def _steps(self) -> None:
        hangs = [(s.at, s.found_at + 1.4) for s in self.strikes if s.target.startswith("trainer/")]
        now = TRAINING_AT
        for step in range(self.num_steps):
            begin = now
            now += STEP_SECONDS * self.rng.uniform(0.85, 1.25)
            stalled = next((end for at, end in hangs if begin <= at < now), None)
            if stalled is not None:
                self.at(stalled - 1.3, lambda s=step: self.say(  # type: ignore[misc]
                    K.STEP_INTERRUPTED, {"step": s, "epoch": 1, "because": "trainer/1#1 was fenced"}))  # fmt: skip
                now = stalled
            self.at(now, lambda s=step, t=now - begin: self._commit(s, t))  # type: ignore[misc]
        if self.finish:
            self.at(now + 2.0, self._end)

    def _commit(self, step: int, seconds: float) -> None:
        groups = [GroupId(f"g{step * GROUPS_PER_STEP + n:05d}") for n in range(GROUPS_PER_STEP)]
        lines = [LedgerLine(group_id=g, state=GroupState.ISSUED) for g in groups]
        lines += [LedgerLine(group_id=g, state=GroupState.ASSIGNED, step=step, num_tokens=96) for g in groups]
        if step % 40 == 39:
            stale = GroupId(f"g{90_000 + step}")
            lines.append(LedgerLine(group_id=stale, state=GroupState.ISSUED))
            reason = "its first token is more than 2 versions old"
            lines.append(LedgerLine(group_id=stale, state=GroupState.DROPPED, num_tokens=96, reason=reason))
        head = self.ledger.write(lines)
        self.ledger.write([LedgerLine(group_id=g, state=GroupState.TRAINED, step=step, num_tokens=96) for g in groups])
        learned = 0.93 / (1 + math.exp(-(step - 0.42 * self.num_steps) / (0.09 * self.num_steps)))
        epoch = self.journal.epoch()
        self.say(
            K.STEP_COMMITTED,
            {
                "step": step,
                "epoch": epoch.number if epoch else 0,
                "groups": list(groups),
                "microbatches": [f"{step}.{n}" for n in range(4)],
                "reward": max(0.0, min(1.0, 0.04 + learned + self.rng.gauss(0, 0.03))),
                "loss": 0.02 * math.exp(-step / 60) + self.rng.gauss(0, 0.002),
                "seconds": seconds,
                "staleness": 1,
                "health": made_health(step, self.num_steps),
                "log_ratio_max": 0.002 if step % 5 else None,
                "tokens": GROUPS_PER_STEP * 96,
                "ledger": {"position": head.position, "hash": head.hash},
            },
        )
        self.version = step + 1
        self._checkpoint(step, head, groups)
        for replica in ("rollout/0", "rollout/1", "rollout/2"):
            if replica not in self.away:
                self._admit(replica)

    def _checkpoint(self, step: int, head: ChainHead, groups: Sequence[GroupId]) -> None:
        if step % self.job.checkpoint.every_steps != self.job.checkpoint.every_steps - 1:
            return
        folder = self.run.checkpoints / f"step-{step:08d}"
        folder.mkdir()
        commit = {"step": step, "group_ids": list(groups), "ledger": {"position": head.position, "hash": head.hash}}
        raw = json.dumps({"format": 1, "commit": commit}).encode()
        (folder / "commit.json").write_bytes(raw)
        written = {"commit.json": {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}}
        (folder / "meta.json").write_text(json.dumps({"format": 1, "step": step, "files": written}))
        self.say(K.CHECKPOINT_WRITTEN, {"path": str(folder), "step": step})

    def _admit(self, replica: str) -> None:
        self.away.discard(replica)
        digest = f"{self.version:064x}"
        proof = {
            "manifest_digest": digest,
            "received_digest": digest,
            "storage_digest": f"{self.version + 1:064x}",
            "covered": 19,
            "uncovered": ["model.layers.0.mlp.down_proj.weight"],
            "canary_logprobs": [-1.25, -0.5],
        }
        body = {
            "replica": replica,
            "incarnation": self.incarnation[replica],
            "epoch": 1,
            "policy_version": self.version,
            "holder": "trainer/0",
            "bytes": 4_194_304,
            "seconds": 0.031,
            "proof": proof,
        }
        self.say(K.WEIGHTS_ADMITTED, body)
        self._actual(replica, ReplicaState.SERVING)

    # --- faults and repairs -------------------------------------------------------------------------------------

    def _strike(self, strike: Strike) -> None:
        incident = IncidentId(f"i-{self.strikes.index(strike) + 1}")
        found = strike.found_at
        self.at(strike.at, lambda: self._inject(strike))
        self.at(found + 0.02, lambda: self._open(incident, strike))
        self.at(found + 0.05, lambda: self._plan(incident, strike))
        if strike.target.startswith("rollout/"):
            self.at(found + 0.12, lambda: self._move(strike))
            self.at(found + strike.serving_after - 0.7, lambda: self._promote(strike.target))
            self.at(found + strike.serving_after, lambda: self._admit(strike.target))
            self.at(found + strike.serving_after + 0.3, lambda: self._starting("standby/0", self.freed))
            self.at(found + 12.0, lambda: self._ready("standby/0", from_standby=""))
        else:
            self.at(found + 0.2, lambda: self._lose(strike.target, "fenced: a newer incarnation is desired"))
            self.at(found + 0.25, lambda: self._epoch(f"{strike.target} is lost", without=strike.target))
            self.at(found + 0.5, lambda: self._starting(strike.target, self.node[strike.target]))
            self.at(found + strike.serving_after - 2, lambda: self._ready(strike.target, from_standby=""))
            self.at(found + strike.serving_after, lambda: self._epoch(f"{strike.target} has joined"))
        self.at(found + strike.verified_after, lambda: self._close(incident, strike))

    def _inject(self, strike: Strike) -> None:
        replica = strike.target
        line = {
            "kind": strike.kind,
            "how": strike.how,
            "target": replica,
            "incarnation": self.incarnation[replica],
            "node": self.node[replica],
            "pid": self.pid[replica],
            "start_ticks": self.pid[replica] * 10,
            "injected_at": self.clock.wall(),
        }
        with self.run.injections_path.open("a") as f:
            f.write(json.dumps(line) + "\n")

    def _open(self, incident: IncidentId, strike: Strike) -> None:
        self.named = self.incarnation[strike.target]
        suspect = Suspect(
            node=NodeId(self.node[strike.target]),
            role=strike.target.partition("/")[0],
            replica=strike.target,
            incarnation=self.named,
        )
        diagnosis = Diagnosis(
            suspects=(suspect,),
            fault_class=strike.fault_class,
            onset=self.wall_zero + strike.at + 0.1,
            detected_at=self.wall_zero + strike.found_at,
            confidence=0.97,
            because=strike.because,
            evidence=tuple(Evidence(kind="progress", text=t) for t in strike.evidence),
            detectors=("progress",),
        )
        self.say(K.INCIDENT_OPENED, {"diagnosis": diagnosis.to_dict(), "window": "0" * 16}, incident)

    def _plan(self, incident: IncidentId, strike: Strike) -> None:
        target = PlanTarget(
            replica=ReplicaId(strike.target), incarnation=self.named, node=NodeId(self.node[strike.target])
        )
        plan = Plan(
            incident_id=incident,
            action=ActionKind.REPLACE_REPLICA,
            targets=(target,),
            because=f"replace {strike.target}#{self.named}: the smallest unit that contains the suspect",
        )
        self.say(K.PLAN_CREATED, {"plan": plan.to_dict()}, incident)
        self.say(K.ACTION_STARTED, {"plan": plan.to_dict(), "digest": plan.digest}, incident)
        desired = Desired(replica=target.replica, incarnation=self.named + 1, node=target.node, incident_id=incident)
        self.journal.set_desired(desired)
        self.say(
            K.ACTION_DONE,
            {"digest": plan.digest, "result": {"done": True, "because": "the desired state is written"}},
            incident,
        )

    def _move(self, strike: Strike) -> None:
        self._lose(strike.target, "its process exited")
        others = [f"rollout/{n}" for n in range(3) if f"rollout/{n}" != strike.target]
        body = {
            "from_replica": strike.target,
            "from_incarnation": self.named,
            "to": others,
            "num_requests": 24,
            "tokens_kept": 862,
            "tokens_lost": 0,
        }
        self.say(K.REQUESTS_REASSIGNED, body)

    def _close(self, incident: IncidentId, strike: Strike) -> None:
        because = f"{strike.target}#{self.incarnation[strike.target]}: finished 7 units of work"
        self.say(K.INCIDENT_VERIFIED, {"because": because}, incident)
        self.say(K.INCIDENT_CLOSED, {"outcome": "resolved", "because": because}, incident)

    # --- replicas -----------------------------------------------------------------------------------------------

    def _starting(self, replica: str, node: str | None = None) -> None:
        if node is not None:
            self.incarnation[replica] += 1
            self.node[replica] = node
            self.pid[replica], self.next_pid = self.next_pid, self.next_pid + 37
        body = {"replica": replica, "incarnation": self.incarnation[replica], "node": self.node[replica]}
        self.say(K.REPLICA_STARTING, body)
        wanted = Desired(
            replica=ReplicaId(replica), incarnation=self.incarnation[replica], node=NodeId(self.node[replica])
        )
        self.journal.set_desired(wanted)

    def _ready(self, replica: str, *, from_standby: str) -> None:
        body = {
            "replica": replica,
            "incarnation": self.incarnation[replica],
            "node": self.node[replica],
            "pid": self.pid[replica],
            "start_ticks": self.pid[replica] * 10,
            "from_standby": from_standby,
        }
        self.say(K.REPLICA_READY, body)
        self._actual(replica, ReplicaState.READY)

    def _promote(self, replica: str) -> None:
        """The standby's process takes the replica's name; the node of the lost one becomes free."""
        self.freed, self.node[replica] = self.node[replica], self.node["standby/0"]
        self.incarnation[replica] += 1
        self.pid[replica] = self.pid["standby/0"]
        stopped = {"replica": "standby/0", "incarnation": self.incarnation["standby/0"], "because": "promoted"}
        self.say(K.REPLICA_STOPPED, stopped)
        self._ready(replica, from_standby="standby/0")

    def _lose(self, replica: str, because: str) -> None:
        self.away.add(replica)
        body = {"replica": replica, "incarnation": self.incarnation[replica], "because": because}
        self.say(K.REPLICA_LOST, body)
        self._actual(replica, ReplicaState.LOST)

    def _epoch(self, because: str, without: str = "") -> None:
        working = [r for r in HOMES if not r.startswith("standby/") and r != without]
        self.journal.grow_epoch([(ReplicaId(r), self.incarnation[r]) for r in working], because=because)
        for replica in working:
            self._actual(replica, ReplicaState.SERVING)

    def _actual(self, replica: str, state: ReplicaState) -> None:
        record = Actual(
            replica=ReplicaId(replica),
            incarnation=self.incarnation[replica],
            node=NodeId(self.node[replica]),
            state=state,
            pid=self.pid[replica],
            start_ticks=self.pid[replica] * 10,
        )
        self.journal.set_actual(record)

    def say(self, kind: K, body: dict[str, Any], incident: IncidentId | None = None) -> None:
        self.journal.append(filled(kind, body), incident_id=incident)


def made_health(step: int, num_steps: int) -> dict[str, float]:
    """Signs of a policy that learns well; of every tenth step no answer was over. No critic, no reference."""
    done = step / num_steps
    wave = 0.5 + 0.5 * math.sin(step / 3)
    reported = {
        "entropy": 0.4 + 2.2 * (1 - done) ** 2,
        "clip_fraction_low": 0.004 + 0.01 * wave,
        "clip_fraction_high": 0.003 + 0.004 * wave,
        "ratio_mean": 1.0 + 0.01 * wave,
        "ratio_std": 0.05 + 0.05 * wave,
        "ratio_max": 1.5 + 2 * wave,
        "kl_sampler": 0.002 + 0.006 * wave,
        "kl_reference": 0.0,
        "capped_fraction": 0.0,
        "stale_fraction": 0.02 * wave,
        "filtered_fraction": 0.1 + 0.7 * abs(0.5 - done),
    }
    if step % 10 != 9:
        reported |= {
            "response_length": 12.0 + 6 * done + wave,
            "response_length_max": float(20 + int(4 * wave)),
            "truncated_fraction": 0.3 * (1 - done) ** 3,
        }
    return reported


if __name__ == "__main__":
    FakeRun(Path(sys.argv[1])).build()
