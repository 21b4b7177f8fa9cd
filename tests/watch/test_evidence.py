"""Evidence that is pulled for an incident: real agents, real processes, real py-spy; and all the ways it is not to be
had."""

import json
import os
import pickle
import re
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.collectors.base import Collector
from rolecall.agent.collectors.gpu.xid_merger import XidMerger
from rolecall.agent.collectors.kernel.collector import KernelLogCollector
from rolecall.agent.collectors.nccl.ras import NcclRasCollector
from rolecall.agent.collectors.process.discovery import parse_discovery
from rolecall.agent.collectors.process.uninstrumented import UninstrumentedJobCollector
from rolecall.agent.node import Agent, AgentSettings
from rolecall.agent.registry import Registry
from rolecall.cli.main import main
from rolecall.core.clock import SystemClock
from rolecall.core.diagnosis import Diagnosis, Finding, Suspect
from rolecall.core.faults import EvidenceKind, FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir, bearer_token, create_run_dir
from rolecall.core.telemetry import ProcessSample
from rolecall.detector.base.plain_pickle import UnsafePickle
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.diagnose.diagnose import diagnose
from rolecall.recovery.interfaces import CollectedEvidence
from rolecall.reports.incident_export import evidence_files, export
from rolecall.reports.redaction import Redactor, redacted
from rolecall.session.demo import demo_job
from rolecall.watch.agents import listed, named_agents, observing_run
from rolecall.watch.evidence import pull as evidence_pull
from rolecall.watch.evidence.diagnosis import EvidenceFile, analyse_evidence
from rolecall.watch.evidence.pull import EvidencePull, no_token
from rolecall.watch.evidence.requests import select_evidence
from rolecall.watch.run import watch_run
from tests.agent.collectors.test_uninstrumented import TORCH
from tests.agent.collectors.test_uninstrumented import Job as Ranks
from tests.agent.processes import NODE, TOKEN, AgentProcess, Child
from tests.agent.ras_server import RasServer, answers
from tests.detector.artifacts.test_flight_recorder import BEGAN_NS, WORLD, Job
from tests.detector.fake_agent import FakeAgent
from tests.detector.live.test_pulled import TIE
from tests.detector.scenario import Scenario
from tests.docs.pages import complaint
from tests.formats.test_nccl_ras import communicator, rank, raw
from tests.support import PATIENCE_SECONDS, eventually

BEARER = f"Bearer {bearer_token(TOKEN)}"
INCIDENT = "inc-1-trainer-1"
STALL = "exec('def wait_for_data():\\n import threading\\n threading.Event().wait()\\nwait_for_data()')"
STALL_IN_COLLECTIVE = STALL.replace("wait_for_data", "all_reduce")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = create_run_dir(tmp_path / "runs", "run-1")
    run.write({"run_id": "run-1", "config": {}})
    return run


def subject(
    child_pid: int, start_ticks: int, index: int, *, collectives: int = 0, node: str = NODE
) -> MonitoredProcess:
    process = ProcessId(node=NodeId(node), pid=child_pid, start_ticks=start_ticks)
    replica = f"trainer/{index}"
    sample = ProcessSample(
        process=process, role="trainer", replica=replica, rank=0, incarnation=1, at=1.0, wall_at=2.0, alive=True,
        page_ok=True, phase="compute", collectives_entered=collectives,
    )  # fmt: skip
    return MonitoredProcess(replica, "trainer", 0, 1, node, process, seen_wall=2.0, sample=sample)


def diagnosis(subjects: list[MonitoredProcess], fault: FaultClass = FaultClass.HANG) -> Diagnosis:
    return Diagnosis(
        suspects=tuple(
            Suspect(node=NodeId(s.node), role=s.role, replica=s.replica, rank=0, incarnation=1, process=s.process)
            for s in subjects
        ),
        fault_class=fault,
        onset=1.0,
        detected_at=2.0,
        confidence=0.8,
        because="it stands still",
    )


def reported(pull: EvidencePull) -> CollectedEvidence:
    found: list[CollectedEvidence] = []
    eventually(lambda: found.extend(pull.collected()) or found, "the evidence is reported")
    return found[0]


@pytest.fixture
def node_dir(tmp_path: Path) -> Path:
    path = tmp_path / "node-1"
    (path / "pages").mkdir(parents=True)
    return path


@pytest.fixture
def agent(node_dir: Path) -> Iterator[AgentProcess]:
    it = AgentProcess(node_dir)
    yield it
    it.close()


@pytest.fixture
def children(node_dir: Path, agent: AgentProcess) -> Iterator[list[Child]]:
    made = [Child(node_dir) for _ in range(3)]
    for n, child in enumerate(made):
        child.start(f"trainer/{n}")
    eventually(lambda: all(agent.newest(f"trainer/{n}") for n in range(3)), "all are registered")
    yield made
    for child in made:
        child.close()


def test_a_stalled_process_is_shown_with_its_function(run: RunDir, agent: AgentProcess, children: list[Child]) -> None:
    children[1].execute(STALL)
    fleet = [subject(c.pid, c.start_ticks, n) for n, c in enumerate(children)]
    pull = EvidencePull(run, lambda: {NODE: f"http://{agent.netloc}"}, lambda _: BEARER, lambda: fleet, SystemClock())
    pull.request(INCIDENT, diagnosis([fleet[1]]))
    body = reported(pull).payload.to_body()
    names = [f["name"] for f in body["files"]]
    assert names == [f"evidence/{INCIDENT}/stacks-trainer-{n}-rank_0.json" for n in (1, 0, 2)], body
    assert "wait_for_data" in body["statements"][0] and "trainer/1 rank 0" in body["statements"][0], body["statements"]
    assert body["because"].startswith("3 stacks") and body["missing"] == []
    kept = json.loads((run.path / names[0]).read_text())
    assert any(f["name"] == "wait_for_data" for t in kept["threads"] for f in t["frames"])
    assert stat.S_IMODE(os.stat(run.path / names[0]).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(run.path / "evidence").st_mode) == 0o700
    pull.close()


def test_a_suspicion_is_decided_by_stacks_that_are_not_kept(
    run: RunDir, agent: AgentProcess, children: list[Child]
) -> None:
    for child in (children[0], children[2]):
        child.execute(STALL_IN_COLLECTIVE)
    children[1].execute(STALL)
    fleet = [subject(c.pid, c.start_ticks, n) for n, c in enumerate(children)]
    pull = EvidencePull(run, lambda: {NODE: f"http://{agent.netloc}"}, lambda _: BEARER, lambda: fleet, SystemClock())
    suspicion = replace(diagnosis(fleet), fault_class=FaultClass.CANNOT_TELL)
    found: list[Finding] = []

    def decided() -> bool:
        pull.probe([suspicion])  # as after each observation
        found.extend(pull.findings())
        return bool(found)

    eventually(decided, "the stacks are read")
    assert [s.replica for s in found[0].suspects] == ["trainer/1"]
    assert not (run.path / "evidence").exists() and not pull.collected()
    pull.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("function", "accused"), [("wait_for_data", True), ("save_checkpoint", False)])
def test_a_rank_that_writes_a_checkpoint_is_not_accused(
    tmp_path: Path, function: str, accused: bool, num_ranks: int
) -> None:
    files = []
    for rank_, name in enumerate(["all_reduce", function, "all_reduce", "all_reduce"][:num_ranks]):
        path = tmp_path / f"trainer-0_rank{rank_}.json"
        file = "torch/distributed/distributed_c10d.py" if name == "all_reduce" else "train.py"
        frames = [{"name": name, "filename": file}, {"name": "train", "filename": "train.py"}]
        thread = {"thread_name": "MainThread", "active": False, "owns_gil": False, "frames": frames}
        path.write_text(json.dumps([thread]))
        process = ProcessId(node=NodeId(NODE), pid=10 + rank_, start_ticks=1)
        who = Suspect(
            node=NodeId(NODE), role="trainer", replica="trainer/0", rank=rank_, incarnation=0, process=process
        )
        files.append(EvidenceFile(kind=EvidenceKind.STACKS, path=path, who=who, suspected=True))
    analysis = analyse_evidence(files)
    assert [s.rank for f in analysis.findings for s in f.suspects] == [1]
    found = analysis.of_a_suspicion()
    assert [f.fault_class for f in found] == [FaultClass.HANG] * accused


def recording(child: Child, content: dict[str, Any], stall: str = STALL) -> None:
    """Gives `child` a torch whose Flight Recorder holds `content`, and has its main thread hang."""
    child.do(
        "import sys, types; m = types.ModuleType('torch._C._distributed_c10d'); "
        f"m._dump_nccl_trace = lambda **options: {pickle.dumps(content, protocol=2)!r}; "
        "sys.modules['torch._C._distributed_c10d'] = m"
    )
    child.execute(stall)


def test_the_engine_process_of_a_trainer_rank_that_holds_a_weight_transfer_up_is_told(tmp_path: Path) -> None:
    def threads(*names: str) -> list[dict[str, Any]]:
        frames = [dict(zip(("filename", "name"), name.split(":"), strict=True)) for name in names]
        return [{"thread_name": "MainThread", "active": False, "owns_gil": False, "frames": frames}]

    answers: list[dict[str, Any]] = [
        {"threads": threads("torch/distributed/distributed_c10d.py:broadcast", "t.py:update_weights")},
        {
            "threads": threads("concurrent/futures/_base.py:result", "t.py:update_weights"),
            "engines": [
                {"pid": 201, "parent": 101, "title": "VLLM::EngineCore", "is_stopped": False,
                 "threads": threads("threading.py:wait", "worker.py:load_weights")},
            ],
        },
    ]  # fmt: skip
    files = []
    for rank_number, answer in enumerate(answers):
        path = tmp_path / f"stacks-{rank_number}.json"
        identity = {"node": "vm", "pid": 100 + rank_number, "replica": "trainer/0", "rank": rank_number}
        body = json.dumps({**identity, **answer}).encode()
        path.write_bytes(redacted(EvidenceKind.STACKS, body, Redactor()))
        who = Suspect(node=NodeId("vm"), role="trainer", replica="trainer/0", rank=rank_number, incarnation=0)
        files.append(EvidenceFile(kind=EvidenceKind.STACKS, path=path, who=who, suspected=True))
    analysis = analyse_evidence(files)
    held = "waits for a lock or for another thread of its own: wait (threading.py) < load_weights (worker.py)"
    assert f"stack: trainer/0 rank 1 (VLLM::EngineCore, pid 201) {held}" in analysis.statements
    (found,) = analysis.of_a_suspicion()
    assert (found.fault_class, [s.rank for s in found.suspects]) == (FaultClass.HANG, [1])
    assert found.because.startswith("trainer/0 rank 1 (VLLM::EngineCore, pid 201) holds the weight sync up")


def hanging_job(folder: Path, num_ranks: int, late: int) -> list[dict[str, Any]]:
    """What each rank's Flight Recorder holds when `late` has not entered a collective that the others wait in."""
    job = Job(folder, {WORLD: tuple(range(num_ranks))})
    job.all_did("all_reduce", "all_reduce")
    job.waits([r for r in range(num_ranks) if r != late], WORLD, "all_reduce")
    contents = [job.content(rank) for rank in range(num_ranks)]
    shift_ns = int((SystemClock().wall() - 60.0) * 1e9) - BEGAN_NS
    for entry in (e for c in contents for e in c["entries"]):
        entry["time_created_ns"] += shift_ns
    return contents


def test_a_tie_that_flight_recorders_settle_names_the_rank(
    run: RunDir, agent: AgentProcess, children: list[Child], tmp_path: Path
) -> None:
    """The live detectors see two trainers that wait in the same collective; the recorders of these processes know
    more."""
    for child, content in zip(children, hanging_job(tmp_path, 2, late=1), strict=False):
        recording(child, content)
    tie = Scenario(TIE)
    for n in range(2):
        tie.processes[f"trainer/{n}"].pid, tie.processes[f"trainer/{n}"].node = children[n].pid, NODE
    tie.run()
    *_, last = tie.observations
    (doubt,) = tie.detector.observe(replace(last, wall_at=last.wall_at + 0.1))
    assert doubt.fault_class is FaultClass.CANNOT_TELL
    pull = EvidencePull(
        run, lambda: {NODE: f"http://{agent.netloc}"}, lambda _: BEARER, tie.detector.processes, SystemClock()
    )
    pull.request(INCIDENT, doubt)
    body = reported(pull).payload.to_body()
    assert [f["kind"] for f in body["files"]] == ["stacks"] * 2 + ["flight_recorder"] * 2 and body["missing"] == []
    findings = pull.findings()
    (sure,) = tie.detector.observe(replace(last, wall_at=last.wall_at + 0.2, pulled_findings=findings))
    assert sure.key == "hang:trainer/1#1" and "has not entered all_reduce #3" in sure.because
    assert sure.suspects[0].process == tie.processes["trainer/1"].process()
    assert "has not entered all_reduce #3" in body["because"]
    (again,) = diagnose([run.path / "evidence" / INCIDENT], []).diagnoses[:1]
    assert again.fault_class is FaultClass.HANG and again.suspects[0].rank == 1, (
        "`rolecall diagnose` reads what is kept"
    )


@pytest.mark.parametrize(("function", "accused"), [("wait_for_data", True), ("save_checkpoint", False)])
def test_a_rank_that_works_between_two_steps_is_not_named_for_the_wait_of_the_others(
    run: RunDir, agent: AgentProcess, children: list[Child], tmp_path: Path, function: str, accused: bool
) -> None:
    """It has not entered the collective of the next step, and blocks at a lock or writes a checkpoint."""
    functions = ["all_reduce", "all_reduce", function]
    for child, content, name in zip(children, hanging_job(tmp_path, 3, late=2), functions, strict=True):
        recording(child, content, STALL.replace("wait_for_data", name))
    fleet = [subject(c.pid, c.start_ticks, n, collectives=1) for n, c in enumerate(children)]
    late = fleet[2].sample
    assert late is not None
    fleet[2].sample = replace(late, phase="wait")
    pull = EvidencePull(run, lambda: {NODE: f"http://{agent.netloc}"}, lambda _: BEARER, lambda: fleet, SystemClock())
    pull.request(INCIDENT, diagnosis(fleet, FaultClass.CANNOT_TELL))
    named = [[s.replica for s in f.suspects] for f in reported(pull).payload.findings]
    assert named == [["trainer/2"]] * 2, "stacks and recorders both tell of it"
    assert [f.suspects[0].replica for f in pull.findings()] == ["trainer/2"] * 2 * accused
    pull.close()


XID = "[   77.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
WAITING = "def wait_for_data():\n import sys\n sys.stdin.read()\nwait_for_data()"


@pytest.fixture
def ras() -> Iterator[RasServer]:
    it = RasServer(answers(raw(communicator(rank(0), rank(1)))))
    yield it
    it.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Ranks]:
    it = Ranks(tmp_path / "proc")
    yield it
    it.close()


def pulled(run: RunDir, kind: EventKind = EventKind.EVIDENCE_COLLECTED) -> list[Event]:
    journal = Journal(run.database_url, create=False)
    try:
        return journal.events(kinds=[kind])
    finally:
        journal.close()


def test_a_job_that_knows_nothing_of_us_has_its_evidence_in_its_incident(
    tmp_path: Path, job: Ranks, ras: RasServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a stopped rank, through a real agent with its collectors, to `rolecall incidents` and the bundle for a
    ticket."""
    ranks = [job.python("train.py", code=WAITING, **{**TORCH, "RANK": str(n)}) for n in range(4)]
    log = tmp_path / "kern.log"
    log.write_text(f"[   76.000000] token=hunter2 of a driver\n{XID}")

    def collectors(registry: Registry) -> list[Collector]:
        kernel = KernelLogCollector(node=NODE, merger=XidMerger(), path=log)
        jobs = UninstrumentedJobCollector(registry, NODE, parse_discovery({}), interval_seconds=0.2, proc=job.proc)
        return [jobs, kernel, NcclRasCollector(NODE, ras.address)]

    agent = Agent(AgentSettings(node=NODE, data_dir=tmp_path / "agent", token=TOKEN, collectors=collectors))
    serving = threading.Thread(target=agent.run)
    serving.start()
    stop = threading.Event()
    watching: threading.Thread | None = None
    try:
        eventually(lambda: agent.registry.num_live() == 4, "all are found")
        eventually(lambda: (tmp_path / "agent" / "agent.json").exists(), "it serves")
        run = observing_run(tmp_path / "runs", "stand-in", named_agents(listed(agent.url)))
        watching = threading.Thread(target=watch_run, args=(run, None, BEARER), kwargs={"stop": stop})
        watching.start()
        ranks[1].send_signal(signal.SIGSTOP)

        eventually(
            lambda: any(e.payload.to_body()["files"] and "stack" in e.payload.because for e in pulled(run)),
            "it is in the journal",
        )
    finally:
        for process in ranks:
            process.send_signal(signal.SIGCONT)
        stop.set()
        agent.stop()
        serving.join(PATIENCE_SECONDS)
        if watching is not None:
            watching.join(PATIENCE_SECONDS)
    event = next(e for e in pulled(run) if "stack" in e.payload.because)
    names = [f["name"].rpartition("/")[2] for f in event.payload.to_body()["files"]]
    stacks = [f"stacks-trainer-0-rank_{n}.json" for n in (1, 0, 2)]
    assert names == [*stacks, "nccl_ras-node-1.json", "kernel-node-1.log"], event.payload.to_body()
    assert (
        "trainer/0 rank 1" in event.payload.to_body()["statements"][0]
        and "wait_for_data" in event.payload.to_body()["statements"][0]
    )
    assert any(f["fault_class"] == "gpu" and "79" in f["because"] for f in event.payload.to_body()["findings"])
    folder = run.path / "evidence" / str(event.incident_id)
    assert "hunter2" not in (folder / "kernel-node-1.log").read_text()
    assert [d.fault_class for d in diagnose([folder / "kernel-node-1.log"], []).diagnoses] == [FaultClass.GPU]
    assert main(["incidents", str(event.incident_id), "--run", str(run.path)]) == 1, "it is open"
    shown = capsys.readouterr().out
    assert "evidence collected: 3 stacks, 1 NCCL RAS report, 1 kernel log" in shown and "wait_for_data" in shown
    bundle = export(run, str(event.incident_id))
    assert {f"evidence/{name}" for name in names} <= {m.name for m in bundle.members}


# --- it is not to be had ----------------------------------------------------------------------------------------------

GONE = subject(4_000_001, 1, 1)
"""Of no process: only agents that look for one notice."""


def asks(run: RunDir, url: str, authorization: str = BEARER, *, fault: FaultClass = FaultClass.SLOW) -> dict[str, Any]:
    """What is reported about an incident of `GONE` when its agent is at `url` (nowhere, if that is empty)."""
    agents = {NODE: url} if url else {}
    clock = SystemClock()
    pull = EvidencePull(run, lambda: agents, lambda _: authorization, lambda: [GONE], clock, deadline_seconds=0.5)
    pull.request(INCIDENT, diagnosis([GONE], fault))
    body = reported(pull).payload.to_body()
    pull.close()
    assert body["findings"] == [] and not any(f["kind"] == "stacks" for f in body["files"])
    return body


@pytest.fixture
def fake() -> Iterator[FakeAgent]:
    it = FakeAgent()
    yield it
    it.close()


def test_without_a_token_no_agent_is_queried_and_advice_is_given(run: RunDir, fake: FakeAgent) -> None:
    assert asks(run, fake.url, "")["missing"] == [no_token([fake.url], run.run_id)] and fake.asked == []


def test_the_advice_is_a_command_that_runs(run: RunDir) -> None:
    text = no_token(["http://127.0.0.1:9477", "http://node-2:9477"], run.run_id)
    for command in re.findall(r"`([^`]+)`", text):
        assert "..." not in command
        if command.startswith("rolecall watch"):
            assert complaint(command) == ""
    assert f"--id {run.run_id} --credentials credentials`" in text
    assert "`umask 077; rolecall agent token --bearer > credentials`" in text, "nobody else may read the token"
    assert "http://" not in no_token(["http://n:1"] * 9, run.run_id), "too long a list is not repeated"


def test_agents_with_a_token_are_asked_although_another_has_none(run: RunDir, fake: FakeAgent) -> None:
    other = subject(4_000_002, 1, 2, node="node-2")
    agents = {NODE: fake.url, "node-2": "http://127.0.0.1:9"}
    fake.bad["/v1/evidence/stacks"] = b'{"threads": []}'
    fake.bad["/v1/evidence/kernel_log"] = b"no line of a kernel\n"
    pull = EvidencePull(
        run, lambda: agents, lambda url: BEARER if url == fake.url else "", lambda: [GONE, other], SystemClock()
    )
    pull.request(INCIDENT, diagnosis([GONE, other], FaultClass.SLOW))
    missing = reported(pull).payload.to_body()["missing"]
    pull.close()
    assert missing.count(no_token(list(agents.values()), run.run_id)) == 1 and fake.asked


def test_evidence_of_a_further_suspect_replaces_no_file(
    run: RunDir, fake: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event lists them with their digests. The limit is that of the incident."""
    fake.bad["/v1/evidence/kernel_log"] = b"no line of a kernel\n"
    pull = EvidencePull(run, lambda: {NODE: fake.url}, lambda _: BEARER, lambda: [GONE], SystemClock())
    names, sizes = list[list[str]](), list[int]()
    for part in (1, 2, 3):
        if part == 3:
            monkeypatch.setattr(evidence_pull, "INCIDENT_BYTES_MAX", sum(sizes))
        pull.request(INCIDENT, diagnosis([GONE], FaultClass.CRASH), part)
        collected = reported(pull)
        assert collected.part == part
        names.append([Path(file.name).name for file in collected.payload.files])
        sizes += [file.bytes for file in collected.payload.files]
    pull.close()
    assert names == [["kernel-node-1.log"], ["kernel-node-1.2.log"], []]
    assert sorted(path.name for path in evidence_files(run, INCIDENT)) == ["kernel-node-1.2.log", "kernel-node-1.log"]
    assert "left out" in collected.payload.missing[0]


def test_a_wrong_token_is_reported_once_with_advice(run: RunDir, agent: AgentProcess) -> None:
    stacks, kernel = asks(run, f"http://{agent.netloc}", "Bearer of-another")["missing"]
    assert stacks.startswith("stack of trainer/1 rank 0 (node-1): its agent reports: this needs the run's bearer token")
    assert "docs/reference/agent.md" in stacks and kernel.startswith("kernel log (node-1): its agent reports")


def test_a_process_that_is_gone_is_reported_and_an_agent_without_a_kernel_log_is_not(
    run: RunDir, agent: AgentProcess
) -> None:
    (said,) = asks(run, f"http://{agent.netloc}")["missing"]
    assert "no live registered process 4000001" in said


def test_a_dead_agent_is_asked_once(run: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    said = asks(run, f"http://127.0.0.1:{port}")["missing"]
    assert len(said) == 2 and all("its agent does not answer" in text and "refused" in text for text in said)
    assert all("its agent is unknown" in text for text in asks(run, "")["missing"])


@pytest.mark.parametrize("how", ["silent", "drip"])
def test_an_agent_that_does_not_end_its_answer_is_left_at_the_deadline(run: RunDir, fake: FakeAgent, how: str) -> None:
    fake.bad["/v1/evidence/stacks"] = how
    said = asks(run, fake.url)["missing"]
    assert len(said) == 2 and all("within" in text for text in said), said
    assert fake.asked == [f"/v1/evidence/stacks?pid={GONE.process and GONE.process.pid}"], "and asked nothing more"


def test_an_agent_killed_while_it_is_asked(run: RunDir, agent: AgentProcess) -> None:
    """Stopped first, so that the question lies there when it dies."""
    os.kill(agent.pid, signal.SIGSTOP)
    fleet = [GONE]
    pull = EvidencePull(run, lambda: {NODE: f"http://{agent.netloc}"}, lambda _: BEARER, lambda: fleet, SystemClock())
    pull.request(INCIDENT, diagnosis(fleet))
    eventually(lambda: established(agent), "it is asked")
    agent.kill()
    body = reported(pull).payload.to_body()
    assert all("broke" in text or "does not answer" in text for text in body["missing"]) and len(body["missing"]) > 1


def established(agent: AgentProcess) -> bool:
    """Whether somebody has a connection to it (column `st` of /proc/net/tcp is 01, by its port)."""
    port = int(agent.netloc.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b'{"threads": 1}', b"\xff\xfe", b"[" * 100_000, b'{"threads": [7]}']
)
def test_an_answer_that_makes_no_sense(run: RunDir, fake: FakeAgent, answer: bytes) -> None:
    fake.bad["/v1/evidence/stacks"] = answer
    fake.bad["/v1/evidence/kernel_log"] = b"no line of a kernel\n"
    pull = EvidencePull(
        run, lambda: {NODE: fake.url}, lambda _: BEARER, lambda: [GONE], SystemClock(), deadline_seconds=5.0
    )
    pull.request(INCIDENT, diagnosis([GONE], FaultClass.SLOW))
    said = reported(pull).payload.to_body()["missing"]
    pull.close()
    assert any("stack of trainer/1 rank 0" in text or "stacks-trainer-1-rank_0.json" in text for text in said), said


def test_too_large_an_answer_is_left_out(run: RunDir, fake: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evidence_pull.BYTES_MAX, EvidenceKind.STACKS, 1000)
    fake.bad["/v1/evidence/stacks"] = b" " * 2000
    fake.bad["/v1/evidence/kernel_log"] = b"no line of a kernel\n"
    (said,) = asks(run, fake.url)["missing"]
    assert "more than 1,000 bytes" in said, "and the agent is asked for the rest"


def test_beyond_the_limit_of_stored_incidents_evidence_is_analysed_and_settles_ties(
    run: RunDir, agent: AgentProcess, children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_pull, "NUM_KEPT_MAX", 0)
    for child, content in zip(children, hanging_job(tmp_path, 2, late=1), strict=False):
        recording(child, content)
    fleet = [subject(c.pid, c.start_ticks, n, collectives=1) for n, c in enumerate(children[:2])]
    pull = EvidencePull(run, lambda: {NODE: f"http://{agent.netloc}"}, lambda _: BEARER, lambda: fleet, SystemClock())
    pull.request(INCIDENT, diagnosis(fleet, FaultClass.CANNOT_TELL))
    body = reported(pull).payload.to_body()
    pull.close()
    assert [f.suspects[0].replica for f in pull.findings() if f.fault_class is FaultClass.HANG] == ["trainer/1"]
    assert body["because"].startswith("2 stacks, 2 Flight Recorder dumps; ") and body["findings"]
    assert body["files"] == [] and "already holds the evidence of 0 incidents" in body["missing"][0]
    assert not list((run.path / "evidence").iterdir())


def test_a_folder_that_cannot_be_written_is_reported(run: RunDir, fake: FakeAgent) -> None:
    (run.path / "evidence").write_text("a file in its place")
    fake.bad["/v1/evidence/stacks"] = b'{"threads": []}'
    fake.bad["/v1/evidence/kernel_log"] = b"no line of a kernel\n"
    assert "could not be stored" in asks(run, fake.url)["missing"][0]


def test_more_incidents_than_are_waited_for_are_reported_so(run: RunDir, fake: FakeAgent) -> None:
    fake.bad["/v1/evidence/stacks"] = "silent"
    pull = EvidencePull(run, lambda: {NODE: fake.url}, lambda _: BEARER, lambda: [GONE], SystemClock())
    num = evidence_pull.NUM_WAITING_MAX + evidence_pull.NUM_INCIDENTS_AT_ONCE + 1
    for n in range(num):
        pull.request(f"inc-{n}", diagnosis([GONE], FaultClass.SLOW))
    refused = reported(pull)
    pull.close()
    assert "other incidents are in the queue" in refused.payload.to_body()["missing"][0]


def test_a_run_of_ours_gives_its_own_token(tmp_path: Path) -> None:
    """The agents of the run are found by what they wrote, and asked with what is made of the run's token."""
    run = create_run_dir(tmp_path / "runs", "ours")
    run.token_path.write_text(TOKEN)
    config = demo_job(seed=1, num_steps=1, injection_allowed=False)
    config = config.model_copy(update={"recovery": config.recovery.model_copy(update={"mode": "observe"})})
    run.write({"run_id": "ours", "config": config.model_dump(mode="json")})
    Journal(run.database_url).close()
    node_dir = run.node_dir(NODE)
    (node_dir / "pages").mkdir(parents=True)
    stop = threading.Event()
    watching = threading.Thread(target=watch_run, args=(run,), kwargs={"stop": stop})
    agent, child = AgentProcess(node_dir), Child(node_dir)
    try:
        child.start("rollout/0")
        child.do("reporter.enter_phase('generate'); reporter.progress(3); reporter.update(requests_active=1)")
        watching.start()
        eventually(lambda: pulled(run, EventKind.LEASE_ACQUIRED), "the watch looks")
        for more in range(4, 7):  # work that the watch sees being done: without any, the long deadline of a start holds
            seen = agent.newest("rollout/0") or {"at": 0.0}
            eventually(lambda: (agent.newest("rollout/0") or seen)["at"] > seen["at"] + 1.0, "it has seen some samples")  # noqa: B023
            child.do(f"reporter.progress({more})")
        child.signal(signal.SIGSTOP)
        eventually(lambda: pulled(run), "evidence is in the journal")
    finally:
        child.close()
        agent.close()
        stop.set()
        watching.join(PATIENCE_SECONDS)
    (event,) = pulled(run)
    assert event.payload.to_body()["files"][0]["name"].endswith("stacks-rollout-0-rank_0.json"), event.payload.to_body()


def test_stored_evidence_has_no_control_characters_and_no_secrets() -> None:
    known = Redactor(secrets=["hunter2hunter2"], users=["marianne"])
    lines = redacted(
        EvidenceKind.KERNEL, "[    1.000000] \x1b[31mred\u202e of marianne, hunter2hunter2\tend\r\n".encode(), known
    )
    assert (
        lines == "[    1.000000] \N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER} of user, *** end \n".encode()
    )
    frame = {"name": "score", "filename": "/home/marianne/rl/\u202etask.py"}
    threads = {"node": NODE, "threads": [{"thread_name": "MainThread", "frames": [frame]}]}
    stacks = redacted(EvidenceKind.STACKS, json.dumps(threads, ensure_ascii=False).encode(), known)
    assert (
        stacks.isascii()
        and json.loads(stacks)["one_of_some"] is True
        and b"marianne" not in stacks
        and b'"score"' in stacks
    )
    damaged = b'{"nccl_version": 1, "communicators": [}\n  token=hunter2\n'
    assert redacted(EvidenceKind.NCCL, damaged, known) == b'{"nccl_version": 1, "communicators": [}\n  token=***\n'
    with pytest.raises(ValueError, match="no dump"):
        redacted(EvidenceKind.FLIGHT, b"[]", known)
    with pytest.raises(UnsafePickle, match="refused"):
        redacted(EvidenceKind.FLIGHT, pickle.dumps({"entries": [], "evil": print}, protocol=2), known)


def test_stacks_of_some_processes_accuse_no_unread_process(tmp_path: Path) -> None:
    """Ranks 0, 1 and 3 wait for each other: had all been asked, rank 2 would be dead."""
    frames = [
        {"name": "all_reduce", "filename": "torch/distributed/distributed_c10d.py"},
        {"name": "step", "filename": "t.py"},
    ]
    for rank_ in (0, 1, 3):
        answer = {"node": f"node-{rank_}", "pid": 100 + rank_, "replica": "trainer/0", "rank": rank_, "threads": [
            {"thread_name": "MainThread", "active": False, "owns_gil": False, "frames": frames}]}  # fmt: skip
        (tmp_path / f"whole-{rank_}.json").write_text(json.dumps(answer))
    assert [s.rank for d in diagnose([tmp_path], []).diagnoses for s in d.suspects] == [2]
    for path in tmp_path.iterdir():
        path.write_bytes(redacted(EvidenceKind.STACKS, path.read_bytes(), Redactor()))
    assert diagnose([tmp_path], []).diagnoses == []


def test_evidence_of_a_stopped_process_says_that_it_is_stopped(tmp_path: Path) -> None:
    """And that a dump is missing makes nobody unknown."""
    own = [{"name": "load", "filename": "t.py"}]
    waits = [{"name": "all_reduce", "filename": "torch/distributed/distributed_c10d.py"}, *own]
    files = []

    def take(number: int, is_stopped: bool) -> Path:
        answer = {"node": "vm", "pid": 100 + number, "replica": "trainer/0", "rank": number, "threads": [
            {"thread_name": "MainThread", "active": False, "owns_gil": False, "frames": (waits, own)[number]}]}  # fmt: skip
        path = tmp_path / f"stacks-{number}.json"
        body = json.dumps(answer).encode()
        path.write_bytes(redacted(EvidenceKind.STACKS, body, Redactor(), is_stopped=is_stopped))
        return path

    for number in range(2):
        who = Suspect(
            node=NodeId("vm"), role="trainer", replica="trainer/0", rank=number, incarnation=0,
            process=ProcessId(node=NodeId("vm"), pid=100 + number, start_ticks=1),
        )  # fmt: skip
        path = take(number, number == 1)
        files.append(EvidenceFile(kind=EvidenceKind.STACKS, path=path, who=who, suspected=number == 1))
    (tmp_path / "flight_rank_0.json").write_text(json.dumps(hanging_job(tmp_path, 2, 1)[0]))
    files.append(EvidenceFile(kind=EvidenceKind.FLIGHT, path=tmp_path / "flight_rank_0.json", who=files[0].who))
    analysis = analyse_evidence(files)
    assert "stack: trainer/0 rank 1 is stopped: load (t.py)" in analysis.statements
    said = " ".join([*analysis.statements, *(f.because for f in analysis.findings)])
    assert "its own code" not in said and "cannot be identified" not in said
    assert "is stopped" in str(diagnose([tmp_path / "stacks-0.json", tmp_path / "stacks-1.json"], []).inputs)
    take(1, False)
    unknown = analyse_evidence(files)
    assert "its own code" in str(unknown.statements) and "cannot be identified" in str(unknown.findings)


KILLED = "[  101.000001] {} Killed process {} ({}) total-vm:9kB, anon-rss:8kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB"
OF_ITS_CGROUP, OF_THE_HOST = "Memory cgroup out of memory:", "Out of memory:"


def kernel_log(path: Path, *kills: tuple[str, int, str]) -> list[EvidenceFile]:
    path.write_text("".join(KILLED.format(*kill) + "\n" for kill in kills))
    return [EvidenceFile(kind=EvidenceKind.KERNEL, path=path)]


def test_only_kills_of_the_jobs_own_processes_are_findings(tmp_path: Path) -> None:
    files = kernel_log(
        tmp_path / "kernel-node-1.log",
        (OF_THE_HOST, 812, "chrome"),
        (OF_ITS_CGROUP, 813, "backup"),
        (OF_THE_HOST, 4711, "python3"),
    )
    analysis = analyse_evidence(files, ours=[("node-1", 4711), ("node-2", 812)])
    (found,) = analysis.findings
    assert found.fault_class is FaultClass.RESOURCE_EXHAUSTED
    assert "the kernel killed python3 (4711" in found.because and "chrome" not in str(found)
    of_the_host, of_its_cgroup = [text for text in analysis.statements if "killed" in text]
    assert of_the_host == (
        "kernel: on node-1 it killed chrome (812), which are no ranks of this job: the whole host was short of memory"
    )
    assert of_its_cgroup.endswith(
        "backup (813), which are no ranks of this job: the limit of their own cgroup was reached"
    )


def test_kills_of_others_alone_are_no_finding_and_unknown_processes_leave_all(tmp_path: Path) -> None:
    files = kernel_log(tmp_path / "kernel-node-1.log", (OF_THE_HOST, 812, "chrome"))
    assert analyse_evidence(files, ours=[("node-1", 4711)]).findings == []
    assert len(analyse_evidence(files).findings) == 1


def test_a_stopped_suspect_is_known_when_its_evidence_is_requested() -> None:
    runs, stops = subject(7, 1, 0), subject(8, 1, 1)
    assert stops.sample is not None
    stops.sample = replace(stops.sample, proc_state="T")
    asks = select_evidence(diagnosis([stops]), [runs, stops])
    assert [(a.who.process.pid, a.is_stopped) for a in asks if a.who and a.who.process] == [(8, True), (7, False)]
