"""A weight sync that hangs: real processes with a gloo group, an agent that reads their stacks, and the detector."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from rolecall.core.clock import SystemClock
from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.rundir import RunDir, bearer_token, create_run_dir
from rolecall.core.telemetry import NO_PAGE, ProcessSample
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import suspect
from rolecall.detector.live.stages.evidence.pulled_evidence import UNNAMED_SECONDS
from rolecall.watch.evidence.pull import EvidencePull
from tests.agent.processes import NODE, TOKEN, AgentProcess, Child
from tests.detector.live.test_hooked_job import Job, Rank
from tests.support import eventually

BEARER = f"Bearer {bearer_token(TOKEN)}"
REPLICAS = ("trainer/0", "rollout/0", "rollout/1")

JOIN = (
    "import sys; del sys.path[0]; import torch, torch.distributed as dist; torch.set_num_threads(1); "
    "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', rank={rank}, world_size=3)"
)
TRANSFER = (
    "exec('def {name}():\\n import torch, torch.distributed as dist\\n for n in range(1000):\\n"
    "  dist.broadcast(torch.ones(4_000_000), 0)\\n{name}()')"
)
HELD = "exec('def load_weights():\\n import threading\\n threading.Event().wait()\\nload_weights()')"
OWN_LOCK = "exec('def evict_cache():\\n import threading\\n threading.Event().wait()\\nevict_cache()')"
CORE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
def load_weights():
    threading.Event().wait()
load_weights()
"""
SERVES = (
    f"import subprocess, sys; core = subprocess.Popen(['VLLM::EngineCore', '-S', '-c', {CORE!r}], "
    "executable=sys.executable, stdin=subprocess.PIPE); __import__('asyncio').new_event_loop().run_forever()"
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = create_run_dir(tmp_path / "runs", "run-1")
    run.write({"run_id": "run-1", "config": {}})
    return run


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    path = tmp_path / "node-1"
    (path / "pages").mkdir(parents=True)
    it = AgentProcess(path)
    yield it
    it.close()


@pytest.fixture
def shards(tmp_path: Path, agent: AgentProcess) -> Iterator[list[Child]]:
    """A trainer rank and two engines, in one gloo group."""
    made = [Child(tmp_path / "node-1") for _ in REPLICAS]  # the first path of theirs holds a package `http`
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for n, (child, replica) in enumerate(zip(made, REPLICAS, strict=True)):
        child.start(replica)
        child.execute(JOIN.format(port=port, rank=n))
    for child in made:
        assert child.process.stdout is not None and child.process.stdout.readline() == "ok\n"
    eventually(lambda: all(agent.newest(r) for r in REPLICAS), "all are registered")
    yield made
    for child in made:
        child.close()


def subjects(children: list[Child]) -> list[MonitoredProcess]:
    made = []
    for child, replica in zip(children, REPLICAS, strict=True):
        process = ProcessId(node=NodeId(NODE), pid=child.pid, start_ticks=child.start_ticks)
        role = replica.partition("/")[0]
        sample = ProcessSample(
            process=process, role=role, replica=replica, rank=0, incarnation=1, at=1.0, wall_at=2.0, alive=True,
            page_ok=True, phase="wait",
        )  # fmt: skip
        made.append(MonitoredProcess(replica, role, 0, 1, NODE, process, seen_wall=2.0, sample=sample))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held", "words"),
    [(HELD, "load_weights"), (OWN_LOCK, "evict_cache"), (SERVES, "(VLLM::EngineCore, pid ")],
    ids=["in the transfer", "outside of it", "in the core of a server"],
)
def test_the_engine_at_a_lock_holds_the_transfer_up(
    run: RunDir, agent: AgentProcess, shards: list[Child], held: str, words: str
) -> None:
    shards[0].execute(TRANSFER.format(name="broadcast_weights"))
    shards[1].execute(TRANSFER.format(name="receive_weights"))
    shards[2].execute(held)
    inside = "trainer/0 rank 0, rollout/0 rank 0 wait inside a weight transfer"
    (found,) = [f for f in stacks_of(run, agent, shards, inside) if f.fault_class is FaultClass.HANG]
    assert [s.replica for s in found.suspects] == ["rollout/1"] and found.detector == "weight_sync"
    assert words in found.because


@pytest.mark.slow
def test_two_engines_at_a_lock_and_no_shard_is_named(run: RunDir, agent: AgentProcess, shards: list[Child]) -> None:
    shards[0].execute(TRANSFER.format(name="broadcast_weights"))
    shards[1].execute(HELD)
    shards[2].execute(HELD)
    (found,) = [f for f in stacks_of(run, agent, shards) if f.detector == "weight_sync"]
    assert found.fault_class is FaultClass.CANNOT_TELL and "no shard is named" in found.because


def stacks_of(run: RunDir, agent: AgentProcess, shards: list[Child], inside: str = "") -> list[Finding]:
    """What the first look says in which the trainer is inside of its transfer, and whose text has `inside`."""
    fleet = subjects(shards)
    pull = EvidencePull(run, lambda: {NODE: f"http://{agent.netloc}"}, lambda _: BEARER, lambda: fleet, SystemClock())
    found: list[Finding] = []

    def decided() -> bool:
        suspicion = Diagnosis(
            suspects=tuple(map(suspect, fleet)), fault_class=FaultClass.CANNOT_TELL, onset=1.0, detected_at=2.0,
            confidence=0.1, because="they stand still",
        )  # fmt: skip
        pull.probe([suspicion])
        found[:] = [f for f in pull.findings() if f.detector == "weight_sync" and inside in f.because]
        return bool(found)

    try:
        eventually(decided, "the stacks tell of the transfer")
    finally:
        pull.close()
    return found


class JobWithEngines(Job):
    """Trainer ranks 0 and 1, which report, and two engines, which do not."""

    def __init__(self) -> None:
        super().__init__(4)

    def _sample(self, rank: Rank) -> ProcessSample:
        sample = super()._sample(rank)
        if rank.number < 2:
            return sample
        usual: dict[str, Any] = {"role": "rollout", "replica": f"rollout/{rank.number - 2}", "rank": 0}
        return replace(sample, page_ok=False, phase=NO_PAGE, **usual)


def looked(job: JobWithEngines, fault_class: FaultClass, *names: str) -> Finding:
    who = [s for s in job.detector.suspicions[0].suspects if s.replica in names]
    return Finding(
        detector="weight_sync",
        suspects=tuple(who),
        fault_class=fault_class,
        onset=1_700_000_000.0 + job.now,
        detected_at=1_700_000_000.0 + job.now,
        confidence=0.8 if fault_class is FaultClass.HANG else 0.3,
        because=f"{', '.join(names)}: {fault_class}",
    )


@pytest.fixture
def job() -> JobWithEngines:
    made = JobWithEngines()
    assert made.run(14.0) == []
    made.stand({n: {"phase": "wait"} for n in (0, 1)})
    assert made.run(8.0) == []
    (suspicion,) = made.detector.suspicions
    assert {s.replica for s in suspicion.suspects} == {"trainer/0", "rollout/0", "rollout/1"}
    assert "rollout/0, rollout/1 take part in it" in suspicion.because
    return made


def test_a_shard_is_named_after_two_looks_that_agree(job: JobWithEngines) -> None:
    job.pulled = (looked(job, FaultClass.HANG, "rollout/1"),)
    assert job.run(1.0) == [], "one look may have met it on its way into the transfer"
    job.pulled = (looked(job, FaultClass.HANG, "rollout/0"),)
    assert job.run(1.0) == [], "two looks that do not agree"
    job.pulled = (looked(job, FaultClass.HANG, "rollout/0"),)
    (found,) = job.run(1.0)
    assert found.fault_class is FaultClass.HANG and [s.replica for s in found.suspects] == ["rollout/0"]
    for rank in job.ranks:
        rank.fixed = {}
    assert job.run(3.0) == [], "it ends with the wait"


def test_that_no_shard_can_be_named_is_told_once_it_has_hung_for_a_while(job: JobWithEngines) -> None:
    job.pulled = (looked(job, FaultClass.CANNOT_TELL, "rollout/0", "rollout/1"),)
    assert job.run(UNNAMED_SECONDS / 2) == []
    job.pulled = (looked(job, FaultClass.CANNOT_TELL, "rollout/0", "rollout/1"),)
    assert job.run(UNNAMED_SECONDS) == []
    job.pulled = (looked(job, FaultClass.CANNOT_TELL, "rollout/0", "rollout/1"),)
    (found,) = job.run(1.0)
    assert found.fault_class is FaultClass.CANNOT_TELL and found.because.startswith("rollout/0, rollout/1")
