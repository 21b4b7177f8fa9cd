"""What NVRx is told of this node's health: unfit for hardware faults that stand and for what a watch says, and for nothing
else."""

import json
import socketserver
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.agent.daemon import HEALTH_SOCKET_NAME
from rolecall.agent.events import EventLog
from rolecall.agent.node_health import Fitness, HealthServer, NodeFitness, ask_watch
from rolecall.agent.settings import load_agent_file
from rolecall.core.clock import FakeClock
from rolecall.core.config.job import parse_job
from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.errors import ConfigError
from rolecall.core.faults import FaultClass
from rolecall.core.http import HttpAnswer, HttpFailed
from rolecall.core.ids import NodeId
from rolecall.core.journal.payloads.recovery import NodeQuarantined
from rolecall.core.rundir import RunDir
from rolecall.core.telemetry import AgentEventKind
from rolecall.formats.node_faults import FLAP_SECONDS, HELD_SECONDS, STANDS_SECONDS
from rolecall.recovery.projection import IncidentProjection, open_incident
from rolecall.watch.addresses import ListenAddress
from rolecall.watch.meter import Meter
from rolecall.watch.server import JournalMetricsPoller, WatchServer
from tests.agent.processes import NODE as PROCESS_NODE
from tests.agent.processes import AgentProcess
from tests.recovery.world import World
from tests.support import PATIENCE_SECONDS, eventually

NODE = NodeId("gpu-3")
XID = {"xid": "79", "gpu": "3", "line": "NVRM: Xid (PCI:0000:3b:00): 79, ..."}
K = AgentEventKind
FIT = {"fail_count": 0, "failed_checks": [], "notes": []}


def _messages() -> tuple[Any, Any]:
    """Request and response of NVRx's nvhcd.proto, by protobuf itself: an encoding that is independent of ours."""
    file = descriptor_pb2.FileDescriptorProto(name="nvhcd_test.proto", package="nvhcd_test", syntax="proto3")
    text, flag, whole = (getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{t}") for t in ("STRING", "BOOL", "INT32"))
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="args", number=1, label=3, type=text)
    response = file.message_type.add(name="HealthCheckResponse")
    for number, (name, kind) in enumerate(
        [("success", flag), ("exit_code", whole), ("output", text), ("error", text)], start=1
    ):
        response.field.add(name=name, number=number, label=1, type=kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"nvhcd_test.HealthCheck{kind}") for kind in ("Request", "Response"))
    request_class, response_class = map(message_factory.GetMessageClass, found)
    return request_class, response_class


Request, Response = _messages()


def asked(socket: Path) -> Any:
    """The response, as NVRx asks for it."""
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        call = channel.unary_unary(
            "/nvhcd.HealthCheckService/RunHealthCheck",
            request_serializer=Request.SerializeToString,
            response_deserializer=Response.FromString,
        )
        return call(Request(args=["--no-slurm"]), timeout=60)


class Watched:
    """A node's events, and what its watch says."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.log = EventLog(folder / "events.jsonl", NODE, self.clock)
        self.said: Sequence[str] | Exception = ()
        self.fitness = NodeFitness(self.log, self.clock, self._ask)

    def _ask(self) -> Sequence[str]:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def event(self, kind: AgentEventKind, **detail: str) -> None:
        self.log.append(kind, detail=detail)

    def unfit(self) -> tuple[str, ...]:
        return self.fitness.now().unfit


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Watched]:
    it = Watched(tmp_path)
    yield it
    it.log.close()


# --- what makes a node unfit ----------------------------------------------------------------------------------------


def test_an_xid_that_stays_with_the_gpu_makes_the_node_unfit_for_a_time(node: Watched) -> None:
    assert node.unfit() == ()
    node.event(K.XID, **XID)
    (because,) = node.unfit()
    assert "XID 79 on GPU 3 of gpu-3" in because
    node.clock.advance(STANDS_SECONDS - 1)
    assert node.unfit() == (because,)
    node.clock.advance(2)
    assert node.unfit() == ()


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ((K.GPU_LOST, {"gpu": "2"}), (K.GPU_RECOVERED, {"gpu": "2"})),
        ((K.LINK_DOWN, {"nic": "mlx5_0", "port": "1"}), (K.LINK_UP, {"nic": "mlx5_0", "port": "1"})),
    ],
)
def test_a_condition_makes_it_unfit_until_its_end(node: Watched, begin: Any, end: Any) -> None:
    node.event(begin[0], **begin[1])
    node.clock.advance(FLAP_SECONDS + 10 * STANDS_SECONDS)
    assert len(node.unfit()) == 1
    node.event(end[0], **end[1])
    assert node.unfit() == ()


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        (K.EXITED, {"signal": "9"}),
        (K.EXCEPTION, {"type": "ValueError"}),
        (K.XID, {"xid": "13", "gpu": "0"}),  # of the application
        (K.XID, {"xid": "63", "gpu": "0"}),  # the GPU has repaired itself
        (K.PROBE_DOWN, {"probe": "network", "reason": "hangs for 30 s"}),  # of the agent's own sight
    ],
)
def test_what_is_no_fault_of_the_hardware_leaves_it_fit(node: Watched, kind: AgentEventKind, detail: Any) -> None:
    node.event(kind, **detail)
    node.clock.advance(HELD_SECONDS + FLAP_SECONDS)
    assert node.unfit() == ()


def test_a_link_that_comes_back_at_once_leaves_it_fit(node: Watched) -> None:
    node.event(K.LINK_DOWN, interface="eth0")
    assert node.unfit() == ()
    node.event(K.LINK_UP, interface="eth0")
    node.clock.advance(FLAP_SECONDS + 1)
    assert node.unfit() == ()


def test_faults_before_a_restart_of_the_agent_count_and_those_before_a_boot_do_not(node: Watched) -> None:
    node.event(K.XID, **XID)
    node.clock.advance(100)
    again = NodeFitness(node.log, node.clock, booted_wall=node.clock.wall() - 500)
    assert len(again.now().unfit) == 1
    assert NodeFitness(node.log, node.clock, booted_wall=node.clock.wall() - 50).now().unfit == ()


def test_what_the_watch_says_makes_it_unfit(node: Watched) -> None:
    node.said = ("incident inc-1: XID 79 on GPU 3 of gpu-3", "it is quarantined")
    assert node.unfit() == node.said
    node.event(K.GPU_LOST, gpu="2")
    assert len(node.unfit()) == 3


@pytest.mark.parametrize("failure", [HttpFailed("connection refused", refused=True), ValueError("status 401")])
def test_a_watch_that_does_not_answer_is_no_reason(node: Watched, failure: Exception) -> None:
    node.said = failure
    assert node.fitness.now() == Fitness(notes=(f"the watch was not heard: {failure}",))


# --- its answer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fitness",
    [
        Fitness(),
        Fitness(unfit=("a GPU is lost",)),
        Fitness(unfit=tuple(f"{'x' * 300} {n}" for n in range(20)), notes=("é" * 200,)),
    ],
)
def test_an_answer_is_what_protobuf_reads(fitness: Fitness) -> None:
    read = Response.FromString(fitness.encoded())
    assert (read.success, read.exit_code) == (not fitness.unfit, len(fitness.unfit) > 0)
    value = json.loads(read.output)
    assert value["fail_count"] == len(fitness.unfit) and value["failed_checks"] == [*fitness.unfit]
    assert value["notes"] == [*fitness.notes] and read.error == "; ".join(fitness.unfit)


@contextmanager
def serving(node: Watched, socket: Path) -> Iterator[Path]:
    server = HealthServer(socket, node.fitness)
    server.read(0.0)
    try:
        yield socket
    finally:
        server.close()


def test_it_answers_over_its_socket(node: Watched, tmp_path: Path) -> None:
    with serving(node, tmp_path / "s" / "nvhcd.sock") as socket:
        healthy = asked(socket)
        assert healthy.success and healthy.exit_code == 0 and json.loads(healthy.output) == FIT
        node.event(K.GPU_LOST, gpu="2")
        ill = asked(socket)
        assert not ill.success and ill.exit_code == 1 and "GPU 2 of gpu-3 is lost" in ill.error
        assert socket.stat().st_mode & 0o777 == 0o666, "a job of any user may ask"
    assert not socket.exists()


@pytest.mark.parametrize("place", ["x" * 120, "file"])
def test_a_socket_that_cannot_be_made_is_named(node: Watched, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    server = HealthServer(tmp_path / place / "nvhcd.sock", node.fitness)
    with pytest.raises(CollectorUnavailable, match=r"node_health\.socket: .*nvhcd\.sock: cannot listen there"):
        server.read(0.0)
    server.close()


def test_it_answers_once_the_socket_can_be_made(node: Watched, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.touch()
    server = HealthServer(folder / "nvhcd.sock", node.fitness)
    with pytest.raises(CollectorUnavailable):
        server.read(0.0)
    folder.unlink()
    server.read(60.0)
    try:
        assert asked(folder / "nvhcd.sock").success
    finally:
        server.close()


def test_it_is_off_unless_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("node: gpu-3\n")
    assert load_agent_file(path).node_health.enabled is False
    path.write_text("node_health: {watch: 'watch:9478'}\n")
    with pytest.raises(ConfigError, match=r"node_health\.watch"):
        load_agent_file(path)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "agent.yaml"
    off = "\n".join(f"{name}: {{enabled: false}}" for name in ("gpu", "kernel_log", "network", "infiniband", "storage"))
    path.write_text(f"{off}\nnode_health: {{enabled: true}}\n")
    return path


def test_the_agent_of_a_node_serves_it(config: Path, tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path / "node", "--config", str(config), "--port", "0")
    try:
        socket = tmp_path / "node" / HEALTH_SOCKET_NAME
        eventually(socket.exists, "the socket is there")
        assert json.loads(asked(socket).output) == FIT
    finally:
        agent.close()
    assert not socket.exists()


def test_an_agent_that_cannot_serve_it_watches_its_node_all_the_same(config: Path, tmp_path: Path) -> None:
    """One that ends in place of it would see no fault at all, and is started again without end."""
    (tmp_path / "file").touch()
    socket = tmp_path / "file" / "nvhcd.sock"
    config.write_text(config.read_text().replace("enabled: true", f"enabled: true, socket: {socket}"))
    agent = AgentProcess(tmp_path / "node", "--config", str(config), "--port", "0")
    try:

        def down() -> list[str]:
            return [e["detail"]["reason"] for e in agent.events() if e["kind"] == K.PROBE_DOWN]

        eventually(down, "its probe is down")
        assert any(f"{socket}: cannot listen there" in reason for reason in down())
        assert agent.get("/healthz")[0] == 200
        assert f'rolecall_probe_up{{node="{PROCESS_NODE}",probe="node_health"}} 0' in agent.get("/metrics")[1]
    finally:
        agent.close()


def test_the_agent_of_a_run_does_not_import_grpc(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path / "node")
    try:
        assert "cygrpc" not in Path(f"/proc/{agent.pid}/maps").read_text()
    finally:
        agent.close()


# --- the watch's part -----------------------------------------------------------------------------------------------


@contextmanager
def watching(world: World, path: Path) -> Iterator[WatchServer]:
    job = parse_job({"recovery": world.config.model_dump()})
    address = ListenAddress("127.0.0.1", 0)
    server = WatchServer(RunDir(path), job, address, Meter(world.clock), world.clock, agents=None, poll_seconds=0.01)
    try:
        yield server
    finally:
        server.close()


def heard(url: str, node: NodeId) -> tuple[str, ...]:
    """None of its reasons before it has read the journal: then it answers with status 503."""
    try:
        return ask_watch(url, node)
    except ValueError:
        return ()


def test_a_watch_that_has_not_read_its_journal_calls_no_node_fit(tmp_path: Path) -> None:
    world = World(tmp_path)
    poller = JournalMetricsPoller(world.journal, parse_job({}), "test-run", world.clock, ours=False)
    assert poller.unfit is None
    assert poller.poll() and poller.unfit == {}


@pytest.mark.parametrize(("fault", "unfit"), [(FaultClass.GPU, True), (FaultClass.CRASH, False)])
def test_a_watch_tells_of_incidents_that_stay_with_the_node(tmp_path: Path, fault: FaultClass, unfit: bool) -> None:
    world = World(tmp_path, mode="observe")
    watch = world.watch()
    world.run(1.0, watch)
    world.runtime.inject("rollout/1", fault)
    world.until(world.incidents, watch)
    incident = world.only()
    node = NodeId(next(s.node for s in incident.diagnosis.suspects if s.node))
    with watching(world, tmp_path) as server:
        if unfit:
            eventually(lambda: heard(server.url, node), "the journal is read")
            (because,) = ask_watch(server.url, node)
            assert because.startswith(f"incident {incident.incident_id}: ")
        else:
            world.journal.append(NodeQuarantined(node="node-9", by="me", because="it smells"))
            eventually(lambda: heard(server.url, NodeId("node-9")), "the journal is read")
            assert ask_watch(server.url, node) == ()
        assert ask_watch(server.url, NodeId("another")) == ()


@pytest.mark.parametrize(
    ("fault", "nodes", "unfit"),
    [
        (FaultClass.NETWORK, ("gpu-1",), {"gpu-1"}),
        (FaultClass.NETWORK, ("gpu-1", "gpu-1"), {"gpu-1"}),
        (FaultClass.NETWORK, ("gpu-1", "gpu-2"), set()),  # two ends of a link, or the members of a communicator
        (FaultClass.GPU, ("gpu-1", "gpu-2"), set()),
        (FaultClass.NODE_LOST, ("gpu-1", "gpu-2"), {"gpu-1", "gpu-2"}),
        (FaultClass.HANG, ("gpu-1",), set()),
    ],
)
def test_only_nodes_that_the_diagnosis_tells_to_be_at_fault_are_unfit(
    tmp_path: Path, fault: FaultClass, nodes: Sequence[str], unfit: set[str]
) -> None:
    suspects = tuple(
        Suspect(node=NodeId(node), role="trainer", replica="trainer/0", rank=rank) for rank, node in enumerate(nodes)
    )
    found = Diagnosis(
        suspects=suspects, fault_class=fault, onset=1.0, detected_at=2.0, confidence=0.8, because="it stands still"
    )
    world = World(tmp_path)
    name = open_incident(world.journal, IncidentProjection(), found)
    poller = JournalMetricsPoller(world.journal, parse_job({}), "test-run", world.clock, ours=False)
    assert poller.poll() and poller.unfit is not None and set(poller.unfit) == unfit
    assert all(reasons == (f"incident {name}: it stands still",) for reasons in poller.unfit.values())


def test_another_answer_than_a_watchs_is_an_error(tmp_path: Path) -> None:
    world = World(tmp_path)
    with watching(world, tmp_path) as server:
        with pytest.raises(ValueError, match="status 400"):
            ask_watch(server.url, NodeId(""))
        with pytest.raises(ValueError, match="status 404"):
            ask_watch(f"{server.url}/other", NODE)
    with pytest.raises(HttpFailed):
        ask_watch("http://127.0.0.1:9", NODE)


def test_an_answer_that_is_nested_too_deeply_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that keeps the agent from telling its own faults."""
    answer = HttpAnswer(200, b"[" * 200_000)
    monkeypatch.setattr("rolecall.agent.node_health.request", lambda *_, **__: answer)
    with pytest.raises(ValueError, match="nested too deeply"):
        ask_watch("http://127.0.0.1:9", NODE)


# --- with NVRx's own client -----------------------------------------------------------------------------------------


def test_nvrx_takes_the_node_for_what_it_is(node: Watched, tmp_path: Path) -> None:
    """Real code, where the package is installed: what `ft_launcher` calls before its ranks rendezvous."""
    nvrx = pytest.importorskip("nvidia_resiliency_ext.shared_utils.health_check")
    if not hasattr(nvrx, "NodeHealthCheck"):
        pytest.skip("nvidia-resiliency-ext 0.6 and newer have the check")
    with serving(node, tmp_path / "nvhcd.sock") as socket:
        for endpoint in (str(socket), f"unix://{socket}"):
            check = nvrx.NodeHealthCheck(endpoint=endpoint)
            assert check._channel_target == f"unix://{socket}", "it would skip the check otherwise"
            assert check() is True
        node.event(K.GPU_LOST, gpu="2")
        assert nvrx.NodeHealthCheck(endpoint=str(socket))() is False
        node.event(K.GPU_RECOVERED, gpu="2")
        assert nvrx.NodeHealthCheck(endpoint=str(socket))() is True


def free_port() -> int:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        return int(server.server_address[1])


RANK = "open(__import__('sys').argv[1], 'w').close()"


def launched(socket: Path, port: int, started: Path) -> "subprocess.CompletedProcess[str]":
    """NVRx's launcher with one rank on this node; the rank makes the file `started`."""
    script = started.with_suffix(".py")
    script.write_text(RANK)
    options = ["--nnodes=1", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-id=t"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--ft-node-health-check-endpoint={socket}"]
    main = "from nvidia_resiliency_ext.fault_tolerance.launcher import main; main()"  # as the command `ft_launcher`
    command = [sys.executable, "-c", main, *options, str(script), str(started)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS + 60, check=False)


@pytest.mark.slow
def test_ft_launcher_starts_ranks_on_a_healthy_node_only(config: Path, tmp_path: Path) -> None:
    """Real code, where the package is installed: its launcher, an agent, and an XID in the kernel's log."""
    pytest.importorskip("nvidia_resiliency_ext.fault_tolerance.launcher")
    log = tmp_path / "kern.log"
    log.touch()
    config.write_text(config.read_text().replace("kernel_log: {enabled: false}", f"kernel_log: {{path: {log}}}"))
    agent = AgentProcess(tmp_path / "node", "--config", str(config), "--port", "0")
    socket = tmp_path / "node" / HEALTH_SOCKET_NAME
    try:
        healthy = launched(socket, free_port(), tmp_path / "first")
        assert healthy.returncode == 0 and (tmp_path / "first").exists(), healthy.stderr[-2000:]
        at = datetime.now().astimezone().isoformat()
        with log.open("a") as f:
            f.write(
                f"{at} {NODE} kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.\n"
            )
        eventually(lambda: not asked(socket).success, "the agent has read the line")
        ill = launched(socket, free_port(), tmp_path / "second")
        assert not (tmp_path / "second").exists() and "UnhealthyNodeException" in ill.stderr
        assert "XID 79" in ill.stderr, "its log says why"
    finally:
        agent.close()
