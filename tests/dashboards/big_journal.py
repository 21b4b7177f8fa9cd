"""A journal of a large cluster after weeks: 1,000 replicas, 10,000 incidents, made in seconds.

The lines are what the real Journal writes (its table, its canonical text, its hash chain: `Journal.verify` holds), put
in by one transaction instead of a hundred thousand. `python -m tests.dashboards.big_journal DIR [INCIDENTS]
[REPLICAS]`.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Evidence, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import EventKind as K
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.store import GENESIS, canonical, chain_hash
from rolecall.core.journal.tables import METADATA
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.recovery.fleet_view import FleetView, ReplicaView
from rolecall.recovery.policy import PolicyInput
from tests.events import filled

CLASSES = (
    (FaultClass.CRASH, "crashed: process exited on signal 9 in generate"),
    (
        FaultClass.HANG,
        "has finished nothing for 31 s in phase compute of this step (deadline 24 s = max(10, 5 x P99 4.8))",
    ),
    (FaultClass.SLOW, "is slow: 3.1 times the seconds per unit of 511 peers at equal load, for 60 s"),
    (FaultClass.GPU, "XID 79 on GPU 3: it has fallen off the bus; the node's other GPUs answer"),
    (FaultClass.NETWORK, "mlx5_2 lost its link 4 times within 10 minutes; its peers on the same switch did not"),
)
QUESTION_REPLICAS = 16
"""Replicas in the question that is stored with each plan. A real watch stores the whole fleet: of 1,000 replicas that
is 150 kB a plan, and a journal of 1.5 GB; what is newest is read first either way."""
SECONDS_BETWEEN = 120.0
STEPS_PER_INCIDENT = 1


@dataclass
class BigJournal:
    """`open_incidents`: the newest so many stay open, the last of them waits for an operator's word."""

    root: Path
    num_replicas: int = 1000
    num_incidents: int = 10_000
    open_incidents: int = 3
    seed: int = 7
    run_id: str = "big"
    ends_at: float = 1_700_000_000.0  # wall seconds, about
    clock: FakeClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = FakeClock(wall_offset=self.ends_at - 1000.0 - self.num_incidents * (SECONDS_BETWEEN + 10.5))
        self.rng = random.Random(self.seed)
        trainers = max(2, self.num_replicas // 8)
        rollouts = max(2, self.num_replicas * 6 // 8)
        rewards = max(1, self.num_replicas - trainers - rollouts - 9)
        self.roles = {"controller": 1, "reward": rewards, "trainer": trainers, "rollout": rollouts, "standby": 8}
        self.replicas = [f"{role}/{n}" for role, number in self.roles.items() for n in range(number)]
        self.node = {r: NodeId(f"node-{n // 8:04d}") for n, r in enumerate(self.replicas)}
        self.incarnation = dict.fromkeys(self.replicas, 1)
        self.workers = [r for r in self.replicas if r.startswith(("trainer", "rollout"))]
        self.config = RecoveryConfig()
        self.lines: list[dict[str, Any]] = []
        self.last = GENESIS

    def build(self) -> RunDir:
        run = create_run_dir(self.root, self.run_id)
        run.write({"run_id": self.run_id, "seed": self.seed, "config": {"name": "big"}})
        journal = Journal(run.database_url, clock=self.clock)
        self._story()
        tables = METADATA.tables
        with journal.store.write() as conn:
            conn.execute(tables["events"].insert(), self.lines)
            conn.execute(tables["desired"].insert(), list(self._desired()))
            conn.execute(tables["actual"].insert(), list(self._actual()))
        journal.acquire("watch", "watch@node-0000", 30 * 86400.0)
        journal.close()
        return run

    def _story(self) -> None:
        self._say(K.RUN_STARTED, {"seed": 7, "config_digest": "0" * 16, "roles": self.roles, "num_steps": 20_000})
        self._say(K.LEASE_ACQUIRED, {"holder": "watch@node-0000", "fence": 1, "mode": "act"})
        members = [[r, 1] for r in self.replicas]
        self._say(K.EPOCH_ADVANCED, {"epoch": 1, "members": members, "because": "the fleet stands"})
        step = 0
        for number in range(1, self.num_incidents + 1):
            for _ in range(STEPS_PER_INCIDENT):
                self.clock.advance(SECONDS_BETWEEN / (STEPS_PER_INCIDENT + 1))
                self._step(step)
                step += 1
            self.clock.advance(SECONDS_BETWEEN / (STEPS_PER_INCIDENT + 1))
            self._incident(number, stays_open=number > self.num_incidents - self.open_incidents)
        self._step(step)

    def _step(self, step: int) -> None:
        body = {
            "step": step,
            "epoch": 1,
            "groups": [f"g{step * 16 + n:07d}" for n in range(16)],
            "reward": min(1.0, 0.1 + 0.8 * step / max(1, self.num_incidents) + self.rng.gauss(0, 0.03)),
            "loss": 0.02 + self.rng.gauss(0, 0.002),
            "seconds": 50 + self.rng.uniform(0, 20),
            "staleness": 1,
            "tokens": 4_000_000,
        }
        self._say(K.STEP_COMMITTED, body)

    def _incident(self, number: int, *, stays_open: bool) -> None:
        replica = self.rng.choice(self.workers)
        fault, words = CLASSES[self.rng.randrange(len(CLASSES))]
        before = self.incarnation[replica]
        name = IncidentId(f"i-{number:04d}-{fault}-{replica.replace('/', '-')}")
        node = self.node[replica]
        suspect = Suspect(node=node, role=replica.partition("/")[0], replica=replica, incarnation=before)
        now = self.clock.wall()
        evidence = [
            Evidence(kind="progress", text=f"progress of {replica} stands at {number * 7}; its peers went on by 12",
                     values={"progress": number * 7.0, "peers_median": number * 7.0 + 12}),
            Evidence(kind="process", text=f"pid {4000 + number} of {node} is in state S, has used 0.02 s of CPU in " f"30 s, "
                     "and waits in futex_wait_queue", values={"cpu_seconds": 0.02}),
            Evidence(kind="stack", text="torch/distributed/distributed_c10d.py:2806 all_reduce <- train.py:311 step "
                     "<- train.py:280 main (3 of 3 samples)"),
            Evidence(kind="peers", text="511 peers wait for it in collective 1203 (all_reduce, 64 MiB) since 29 s"),
        ]  # fmt: skip
        diagnosis = Diagnosis(
            suspects=(suspect,), fault_class=fault, onset=now - 9, detected_at=now - 0.1, confidence=0.97,
            because=f"{replica}#{before} (pid {4000 + number} on {node}) {words}",
            evidence=tuple(evidence), detectors=("progress", "stacks"),
        )  # fmt: skip
        target = PlanTarget(replica=ReplicaId(replica), incarnation=before, node=node)
        plan = Plan(incident_id=name, action=ActionKind.REPLACE_REPLICA, targets=(target,),
                    because=f"replace {replica}#{before}: the smallest unit that holds the suspect; no one else is " f"touched")  # fmt: skip
        question = self._question(name, diagnosis)
        self._say(K.INCIDENT_OPENED, {"diagnosis": diagnosis.to_dict(), "window": "observations"}, name)
        self.clock.advance(0.5)
        self._say(K.EVIDENCE_COLLECTED, {"because": f"stacks of {node}", "files": [], "statements": [evidence[2].text],
                                      "findings": [], "missing": [], "seconds": 0.4}, name)  # fmt: skip
        self._say(K.INCIDENT_UPDATED, {"diagnosis": diagnosis.to_dict()}, name)
        verdict = {"plan": plan.to_dict(), "page_oncall": False, "outcome": "tolerated"}
        self._say(K.PLAN_CREATED, {**verdict, "question": question}, name)
        if stays_open:
            if number == self.num_incidents:
                body = {"plan": plan.to_dict(), "digest": plan.digest, "expires_at": self.clock.wall() + 900}
                self._say(K.PLAN_PROPOSED, body, name)
                return
            self._say(K.ACTION_STARTED, {"plan": plan.to_dict(), "digest": plan.digest}, name)
            return
        self._say(
            K.PLAN_BLOCKED, {"digest": plan.digest, "guard": "rate", "because": "5 evictions within the hour"}, name
        )
        self._say(K.ACTION_STARTED, {"plan": plan.to_dict(), "digest": plan.digest}, name)
        self._say(
            K.ACTION_DONE, {"digest": plan.digest, "result": {"done": True, "because": "desired is written"}}, name
        )
        self.incarnation[replica] = before + 1
        self.clock.advance(8.0)
        proof = {"manifest_digest": f"{number:064x}", "received_digest": f"{number:064x}", "covered": 19}
        self._say(K.WEIGHTS_ADMITTED, {"replica": replica, "incarnation": before + 1, "epoch": 1, "proof": proof,
                                       "policy_version": number, "holder": "trainer/0", "bytes": 1 << 30})  # fmt: skip
        self.clock.advance(2.0)
        because = f"{replica}#{before + 1}: 7 units of work since it serves"
        self._say(K.INCIDENT_VERIFIED, {"because": because}, name)
        self._say(K.INCIDENT_CLOSED, {"outcome": "resolved", "because": because}, name)

    def _question(self, name: IncidentId, diagnosis: Diagnosis) -> dict[str, Any]:
        views = tuple(
            ReplicaView(replica=ReplicaId(r), desired_incarnation=1, incarnation=1, state=ReplicaState.SERVING,
                        node=self.node[r], changed_at=self.clock.wall())
            for r in self.replicas[:QUESTION_REPLICAS]
        )  # fmt: skip
        asked = PolicyInput(incident_id=name, diagnosis=diagnosis, fleet=FleetView(replicas=views), config=self.config,
                         past=(), supports=frozenset({ActionKind.REPLACE_REPLICA, ActionKind.TOLERATE}))  # fmt: skip
        return asked.to_dict()

    def _desired(self) -> Iterator[dict[str, Any]]:
        for r in self.replicas:
            record = Desired(replica=ReplicaId(r), incarnation=self.incarnation[r], node=self.node[r])
            yield {name: getattr(record, name) for name in record.__slots__}

    def _actual(self) -> Iterator[dict[str, Any]]:
        for n, r in enumerate(self.replicas):
            for incarnation in range(1, self.incarnation[r] + 1):
                newest = incarnation == self.incarnation[r]
                ready = r.startswith("standby/")
                state = ReplicaState.LOST if not newest else ReplicaState.READY if ready else ReplicaState.SERVING
                record = Actual(
                    replica=ReplicaId(r), incarnation=incarnation, node=self.node[r], state=state, pid=4000 + n,
                    start_ticks=n * 10, changed_at=self.clock.wall(),
                    policy_version=self.num_incidents - (n % 7 == 0) if r.startswith("rollout/") else -1,
                )  # fmt: skip
                yield {name: getattr(record, name) for name in record.__slots__} | {"state": str(state)}

    def _say(self, kind: K, body: dict[str, Any], incident: IncidentId | None = None) -> None:
        entry = {
            "seq": len(self.lines) + 1,
            "kind": str(kind),
            "wall_at": self.clock.wall(),
            "incident_id": incident,
            "caused_by": None,
            "key": None,
            "body": canonical(filled(kind, body).to_body()),
        }
        self.last = chain_hash(self.last, entry)
        self.lines.append({**entry, "hash": self.last})


if __name__ == "__main__":
    incidents, replicas = (int(a) for a in (*sys.argv[2:], *("10000", "1000")[len(sys.argv) - 2 :]))
    big = BigJournal(Path(sys.argv[1]), num_incidents=incidents, num_replicas=replicas, ends_at=SystemClock().wall())
    print(big.build().path)
