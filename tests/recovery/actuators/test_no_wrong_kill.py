"""1,000 seeded cases for each target: whatever the system answers, and whatever changes meanwhile, nothing ends but what
held the processes that the plan names, and no node is taken out of service but theirs.

A case draws what was wrong before the plan (a later process under the same name, a wrong node, a foreign pod), what
changes between calls, and which calls are refused, fail, or stay without an answer, with or without their effect.
"""

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import unquote

import pytest

from rolecall.core.config.actuators import (
    KubeRayActuator,
    KubernetesActuator,
    MilesActuator,
    ProcessesActuator,
    SlurmActuator,
    TorchftActuator,
    VerlActuator,
)
from rolecall.recovery.actuators.calls import NO_STATUS, NOT_SENT, Call, HttpCall, Reply
from rolecall.recovery.actuators.targets.kuberay import REPLICA_LABEL, KubeRay
from rolecall.recovery.actuators.targets.kubernetes import Kubernetes
from rolecall.recovery.actuators.targets.miles import Miles
from rolecall.recovery.actuators.targets.processes import Processes
from rolecall.recovery.actuators.targets.slurm import Slurm
from rolecall.recovery.actuators.targets.target import Order
from rolecall.recovery.actuators.targets.torchft import Torchft
from rolecall.recovery.actuators.targets.verl import Verl
from tests.recovery.actuators.driving import NOW, Driven, drive, member, order
from tests.recovery.actuators.kernel_fake import FakeKernel, Process, run_node_end
from tests.recovery.actuators.kubernetes_fake import NAMESPACE, FakeKubernetes
from tests.recovery.actuators.slurm_fake import FakeSlurm, Job
from tests.recovery.actuators.verl_fake import Engine, FakeVerl

CASES = 1000
HTTP_FAULTS = (500, 503, 403, 409, 410, 404, 422, 429, 401, NOT_SENT, NO_STATUS, 200, 201)
COMMAND_FAULTS = (1, 127, NO_STATUS, 0)
NODE_FAULTS = (1, 2, 127, 255, NO_STATUS)
"""Of ssh and of `rolecall node end`: another exit code than 0, or no end within the deadline."""
TEXTS = ("", "oops", "{}", "[]", '{"message": "no"}', '{"metadata": {"name": "x"}}', "Invalid job id specified")


def troubled(
    rng: random.Random, answer: Callable[[Call], Reply], faults: tuple[int, ...], change: Callable[[Call], None]
) -> Callable[[Call], Reply]:
    """`answer` with faults, and `change` before some calls."""
    share, changing = rng.choice((0.0, 0.0, 0.1, 0.4)), rng.random() < 0.4

    def troubled_answer(call: Call) -> Reply:
        if changing and rng.random() < 0.2:
            change(call)
        if rng.random() >= share:
            return answer(call)
        fault = Reply(status=rng.choice(faults), text=rng.choice(TEXTS))
        if call.changes and fault.status in (200, 201):
            return answer(call)  # what says that it was done has done it; of a read, any text may come
        if not fault.known and rng.random() < 0.5:
            answer(call)  # it had its effect
        return fault

    return troubled_answer


def told(it: Driven) -> bool:
    """How it ended; without an end it is the actuator's deadline."""
    return bool(it.done) != bool(it.error) or len(it.calls) >= 50


@pytest.mark.parametrize("kind", ["kubernetes", "kuberay", "nvsentinel"])
def test_pods(kind: str) -> None:
    """`nvsentinel`: actuator `kubernetes`, whose nodes NVSentinel cordons."""
    ends = {"replaced": 0, "refused": 0, "stale": 0}
    for seed in range(CASES):
        rng = random.Random(f"{kind} {seed}")
        fake, hosts = FakeKubernetes(), rng.choice((1, 1, 2))
        if kind == "kuberay":
            counts = {"replicas": 4, "minReplicas": 0, "maxReplicas": 8, "numOfHosts": hosts}
            template = {"spec": {"containers": [{"name": "ray", "image": "ray:1"}]}}
            fake.cluster("ray", {"groupName": "g", **counts, "template": template})
        pods = [f"pod-{n}" for n in range(4)]
        for n, name in enumerate(pods):
            labels = {"app": "rollout", "ray.io/cluster": "ray", "ray.io/group": "g", "ray.io/node-type": "worker"}
            if hosts > 1 and rng.random() < 0.9:
                labels[REPLICA_LABEL] = f"g-{n // hosts}"
            fake.pod(name, f"node-{n if rng.random() < 0.9 else 0}", labels=labels)
        mine = rng.randrange(4)
        whole = pods[mine // hosts * hosts :][:hosts] if kind == "kuberay" else [pods[mine]]
        in_pod = rng.random() < 0.5
        where = pods[mine] if in_pod else fake.pods[pods[mine]]["spec"]["nodeName"]
        may_end = {fake.uid(name) for name in whole}
        pod_uid = "" if in_pod or rng.random() < 0.5 else fake.uid(pods[mine])
        may_cordon = {fake.pods[pods[mine]]["spec"]["nodeName"]}
        wrong = rng.random()
        if wrong < 0.2:  # a later pod, under the same name or, of another owner, on the same node
            fake.pods[pods[mine]]["metadata"]["ownerReferences"][0]["kind"] = rng.choice(("StatefulSet", "Job"))
            fake.replace_pod(pods[mine])
            ends["stale"] += 1
        elif wrong < 0.3:
            where = rng.choice(("node-77", "pod-77"))
        who = member("rollout/1", where, at=NOW if wrong < 0.95 else 0.0, pod_uid=pod_uid)
        given = order(who, leave_node=rng.random() < 0.4)
        place = {"namespace": NAMESPACE, "api": "http://127.0.0.1:9"}
        target: Kubernetes | KubeRay
        if kind != "kuberay":
            by = {"pod": "{node}"} if in_pod else {"selector": "app={role}"}
            if kind == "nvsentinel":
                fake.nvsentinel = rng.choice(("cordons", "cordons", "blocked", "disabled"))
                by["cordon_by"] = "nvsentinel"
            target = Kubernetes(KubernetesActuator.model_validate({"kind": "kubernetes", **place, **by}))
        else:
            target = KubeRay(KubeRayActuator.model_validate({"kind": kind, **place, "cluster": "ray"}))

        others = {name for name in whole if name != pods[mine]}

        def change(
            call: Call,
            fake: FakeKubernetes = fake,
            rng: random.Random = rng,
            others: set[str] = others,
            may_end: set[str] = may_end,
        ) -> None:
            name = rng.choice(sorted(fake.pods))
            again = fake.replace_pod(name)
            if name in others:  # a host of the same replica, which ends as a whole
                others.add(again)
                may_end.add(fake.uid(again))

        it = drive(target.replace(given), troubled(rng, fake.reply, HTTP_FAULTS, change))
        assert set(fake.ended) <= may_end, (seed, it)
        assert set(fake.cordoned) <= (may_cordon if given.leave_node else set()), (seed, it)
        assert told(it), (seed, it)
        for cluster in fake.clusters.values():
            (group,) = cluster["spec"]["workerGroupSpecs"]
            assert group["replicas"] == 4, (seed, it)
            left = (group.get("scaleStrategy") or {}).get("workersToDelete")
            assert not left or "by hand" in it.error or not it.done + it.error, (seed, it)
        ends["replaced" if fake.ended else "refused"] += 1
    assert min(ends.values()) > CASES / 10, ends


@pytest.mark.parametrize("unit", ["job", "step"])
def test_jobs(unit: str) -> None:
    ends = {"replaced": 0, "refused": 0, "stale": 0}
    for seed in range(CASES):
        rng = random.Random(f"{unit} {seed}")
        array = rng.random() < 0.3
        jobs = [
            Job(20 + n, [f"n-{n}", *(["n-9"] if rng.random() < 0.2 else [])], array=(20, n) if array else None)
            for n in range(4)
        ]
        fake = FakeSlurm(*jobs)
        mine = rng.choice(jobs)
        name = mine.called if unit == "job" else f"{mine.number}.0"
        may_end = {(name, mine.start if unit == "job" else mine.steps[0])}
        node, wrong = mine.nodes[0], rng.random()
        if wrong < 0.2:
            fake.start_again(mine)
            ends["stale"] += 1
        elif wrong < 0.3:
            node = rng.choice([n for n in ("n-0", "n-1", "n-2", "n-3") if n not in mine.nodes])
        elif wrong < 0.35:
            mine.state = rng.choice(("PENDING", "COMPLETING", "FAILED"))
            mine.steps.clear()
        at = NOW if wrong < 0.95 else 0.0
        given: Order = order(
            member("rollout/1", node, job=f"{mine.number}.0", at=at), leave_node=unit == "job" and rng.random() < 0.4
        )

        def change(call: Call, fake: FakeSlurm = fake, rng: random.Random = rng) -> None:
            # Slurm has no condition on what a number means: a job that starts again within the milliseconds between
            # the last look and the call is ended.
            if not call.changes or call.key == "drain":
                fake.start_again(rng.choice(list(fake.jobs.values())))

        target = Slurm(SlurmActuator.model_validate({"kind": "slurm", "unit": unit}))
        it = drive(target.replace(given), troubled(rng, _forgiving(fake), COMMAND_FAULTS, change))
        assert set(fake.ended) <= may_end and len(fake.ended) <= 1, (seed, it)
        assert set(fake.drained) <= ({node} & set(mine.nodes) if given.leave_node else set()), (seed, it)
        assert told(it), (seed, it)
        ends["replaced" if fake.ended else "refused"] += 1
    assert min(ends.values()) > CASES / 10, ends


def test_processes_of_slime_and_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rolecall node end` itself, on nodes in memory: three engines on two nodes under the same PIDs, each a server with
    a core and its worker. Between any two of its looks and signals processes end, and others get their PIDs."""
    ends = {"replaced": 0, "refused": 0, "stale": 0}
    for seed in range(CASES):
        rng = random.Random(f"processes {seed}")
        kernels = {node: FakeKernel() for node in ("n-1", "n-2")}
        engines: dict[tuple[str, int], list[Process]] = {}
        for node, kernel in kernels.items():
            for number in range(3):
                pid = 40 + 10 * number
                traits = {"mine": rng.random() < 0.95, "obeys": rng.random() < 0.8, "stuck": rng.random() < 0.05}
                engines[node, number] = [
                    kernel.start(pid, **traits),
                    kernel.start(pid + 1, parent=pid, **traits),
                    kernel.start(pid + 2, parent=pid + 1, **traits),
                ]
        where, mine = rng.choice(("n-1", "n-2")), rng.randrange(3)
        may_end = set(map(id, engines[where, mine]))
        seen, wrong = engines[where, mine][0], rng.random()
        pid, start_ticks = seen.pid, seen.start_ticks
        if wrong < 0.2:  # it has ended; its PID is free, or that of another engine
            kernels[where].over(seen)
            may_end = set()
            if rng.random() < 0.7:
                kernels[where].start(seen.pid)
                kernels[where].start(seen.pid + 5, parent=seen.pid)
            ends["stale"] += 1
        elif wrong < 0.3:  # another start time than that of the process
            start_ticks += rng.choice((-1, 1, 1000))
            may_end = set()

        def later(
            kernel: FakeKernel = kernels[where],
            rng: random.Random = rng,
            family: list[Process] = engines[where, mine],
            share: float = rng.choice((0.0, 0.05, 0.3)),
        ) -> None:
            """One of the family ends, and others get its PID or have that as their parent."""
            if rng.random() < share:
                one = rng.choice(family)
                kernel.over(one)
                for pid, parent in ((one.pid, 1), (rng.choice((one.pid + 1, rng.randrange(300, 400))), one.pid)):
                    if pid not in kernel.processes:
                        kernel.start(pid, parent)

        def change(call: Call, kernel: FakeKernel = kernels[where], seen: Process = seen) -> None:
            if seen.runs:
                kernel.over(seen)
                kernel.start(seen.pid)

        kernels[where].meanwhile = later
        config = {"kind": "processes", "run_on_node": ["ssh", "{node}"], "grace_seconds": rng.choice((0, 0, 2))}
        who = replace(member(f"rollout/{mine}", where, pid=pid), start_ticks=start_ticks)
        others = tuple(
            replace(member(f"rollout/{n + 3}", node, pid=family[0].pid), start_ticks=family[0].start_ticks)
            for (node, n), family in engines.items()
            if (node, n) != (where, mine)
        )

        def answer(call: Call, kernels: dict[str, FakeKernel] = kernels) -> Reply:
            return run_node_end(kernels, call, monkeypatch)

        it = drive(
            Processes(ProcessesActuator.model_validate(config)).replace(order(who, others=others)),
            troubled(rng, answer, NODE_FAULTS, change),
        )
        ended = [one for kernel in kernels.values() for one in kernel.ended]
        assert set(map(id, ended)) <= may_end, (seed, it, ended)
        assert told(it) and len(it.calls) == 1, (seed, it)
        ends["replaced" if ended else "refused"] += 1
    assert min(ends.values()) > CASES / 10, ends


def test_engines_of_verl() -> None:
    ends = {"replaced": 0, "refused": 0, "stale": 0}
    for seed in range(CASES):
        rng = random.Random(f"verl {seed}")
        fake = FakeVerl({n: Engine(40 + n) for n in range(4)}, colocated={0} if rng.random() < 0.3 else set())
        mine, wrong = rng.randrange(4), rng.random()
        engine = fake.engines[mine]
        may_end = set() if mine in fake.colocated else {engine.pid}
        members = [member(f"rollout/{mine}", "n-1", pid=engine.pid)]
        if wrong < 0.2:  # a later engine, or one that has got the PID
            fake.restart(mine)
            if rng.random() < 0.5:
                fake.engines[mine].pid = engine.pid
            may_end = set()
            ends["stale"] += 1
        elif wrong < 0.3:  # its server is gone
            engine.alive = False
            members = [] if rng.random() < 0.7 else members
        elif wrong < 0.4:  # not seen, and it runs
            members, may_end = [], set()
        given = order(*members, begun=rng.random() < 0.2)
        if not members:
            given = replace(given, replica=f"rollout/{mine}")

        def change(call: Call, fake: FakeVerl = fake, rng: random.Random = rng, may_end: set[int] = may_end) -> None:
            fake.restart(rng.randrange(4))

        config = {"kind": "verl", "url": "http://127.0.0.1:9", "token_path": "/t"}
        it = drive(
            Verl(VerlActuator.model_validate(config)).replace(given), troubled(rng, fake.reply, HTTP_FAULTS, change)
        )
        assert set(fake.ended) <= may_end and len(fake.ended) <= 1, (seed, it)
        assert told(it), (seed, it)
        ends["replaced" if fake.ended else "refused"] += 1
    assert min(ends.values()) > CASES / 10, ends


def test_cells_of_miles() -> None:
    """A cell is one of its name, whatever runs in it: what is checked is that no other one is suspended, none that
    somebody else suspends is resumed, and none stays suspended without a word."""
    ends = {"replaced": 0, "refused": 0, "stale": 0}
    for seed in range(CASES):
        rng = random.Random(f"miles {seed}")
        fake, mine = FakeMiles([f"rollout-{n}" for n in range(4)], looks=rng.randrange(4)), rng.randrange(4)
        name, foreign = f"rollout-{mine}", rng.random() < 0.2
        if foreign:
            fake.suspend(name)
            fake.cells[name].phase = rng.choice(("Running", "Suspended"))
            ends["stale"] += 1

        def change(call: Call, fake: FakeMiles = fake, rng: random.Random = rng, name: str = name) -> None:
            fake.suspend(rng.choice(sorted(fake.cells.keys() - {name})))

        target = Miles(MilesActuator.model_validate({"kind": "miles", "url": "http://127.0.0.1:9"}))
        given = order(member(f"rollout/{mine}", "n-1"))
        it = drive(target.replace(given), troubled(rng, fake.reply, HTTP_FAULTS, change))
        assert set(fake.patched) <= (set() if foreign else {name}), (seed, it)
        assert told(it), (seed, it)
        words = it.error or it.calls[-1].words
        assert foreign or not fake.cells[name].to_be_suspended or "resume it by hand" in words, (seed, it)
        ends["replaced" if it.done else "refused"] += 1
    assert min(ends.values()) > CASES / 10, ends


@dataclass
class Cell:
    to_be_suspended: bool = False
    phase: str = "Running"
    looks: int = 0


class FakeMiles:
    """Control server of miles. `looks`: after so many at a cell that is to be suspended it is."""

    def __init__(self, names: list[str], looks: int) -> None:
        self.cells, self._looks = {name: Cell() for name in names}, looks
        self.patched: list[str] = []

    def suspend(self, name: str) -> None:
        self.cells[name].to_be_suspended, self.cells[name].looks = True, 0

    def reply(self, call: Call) -> Reply:
        assert isinstance(call, HttpCall)
        name = call.url.rpartition("/")[2]
        cell = self.cells[name]
        if call.method == "PATCH":
            self.patched.append(name)
            if call.body["spec"]["suspend"]:
                self.suspend(name)
            else:
                self.cells[name] = Cell()
            return Reply(status=200, text="{}")
        if cell.to_be_suspended:
            cell.looks += 1
            cell.phase = "Suspended" if cell.looks > self._looks else cell.phase
        text = {"spec": {"suspend": cell.to_be_suspended}, "status": {"phase": cell.phase}}
        return Reply(status=200, text=json.dumps(text))


def test_groups_of_torchft() -> None:
    ends = {"replaced": 0, "refused": 0, "stale": 0}
    for seed in range(CASES):
        rng = random.Random(f"torchft {seed}")
        fake, mine = FakeLighthouse(rng, 12), rng.randrange(4)
        if rng.random() < 0.2:
            fake.groups[f"ddp_{mine}"].clear()  # it has left the quorum
            ends["stale"] += 1

        def change(call: Call, fake: FakeLighthouse = fake, rng: random.Random = rng) -> None:
            fake.restart(rng.choice(sorted(fake.groups)))

        config = {"kind": "torchft", "url": "http://127.0.0.1:9", "groups": {"trainer": "ddp_{index}"}}
        it = drive(
            Torchft(TorchftActuator.model_validate(config)).replace(order(member(f"trainer/{mine}", "n-1"))),
            troubled(rng, fake.reply, HTTP_FAULTS, change),
        )
        assert set(fake.ended) <= fake.shown & {one for one in fake.ended if one.startswith(f"ddp_{mine}:")}, (seed, it)
        assert len(fake.ended) <= 1 and told(it), (seed, it)
        ends["replaced" if fake.ended else "refused"] += 1
    assert min(ends.values()) > CASES / 10, ends


class FakeLighthouse:
    """Of torchft, with one group of each name, ddp_0 to ddp_11. `shown`: those that its page has listed; a group that
    starts again has another id."""

    def __init__(self, rng: random.Random, num_groups: int) -> None:
        self._rng = rng
        self.groups: dict[str, list[str]] = {f"ddp_{n}": [] for n in range(num_groups)}
        for name in self.groups:
            self.restart(name)
        self.shown: set[str] = set()
        self.ended: list[str] = []

    def restart(self, name: str) -> None:
        self.groups[name] = [f"{name}:{uuid.UUID(int=self._rng.getrandbits(128))}"]

    def reply(self, call: Call) -> Reply:
        assert isinstance(call, HttpCall)
        listed = [one for of_name in self.groups.values() for one in of_name]
        if call.method == "GET":
            self.shown |= {*listed}
            return Reply(status=200, text="".join(f"<b>{one}</b>" for one in listed))
        name = unquote(call.url.split("/")[-2])
        if name not in listed:
            return Reply(status=500, text="Something went wrong: failed to find replica")
        self.ended.append(name)
        self.groups[name.partition(":")[0]].clear()
        return Reply(status=500, text="transport error")


def _forgiving(fake: FakeSlurm) -> Callable[[Call], Reply]:
    """Slurm's answer for a step that has ended is an error, not an exception."""

    def answer(call: Call) -> Reply:
        try:
            return fake.reply(call)
        except KeyError:
            return Reply(status=1, text="scancel: error: Kill job error on job step id: Invalid job id specified")

    return answer
