"""A local Ray cluster: one GCS and one raylet per node, started directly, on loopback, with the run's own token.

`ray start` imports Python for seconds per node, and each raylet then starts two Python agents (dashboard and runtime
environments) that are not needed here. The binaries are therefore started directly, with port files that declare the
agents as not listening: seven nodes are up in about a second. Two `cat` processes replace the agents: one reads the
pipe that the raylet gives its agents, the other a pipe held open only by the supervisor. A raylet exits when one of its
agents exits, so no raylet outlives a killed supervisor. Ray binds everything to loopback when the node address is a
loopback address. Actors request `resources={"<node>": 1}` and no CPUs: rolecall does the placement, and Ray starts no
idle workers in advance.

A node's GPUs are those in its raylet's CUDA_VISIBLE_DEVICES: Ray narrows that list for each actor to the GPUs that the
actor was given.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import ActuatorError, DeadlineExceeded
from rolecall.core.ids import NodeId
from rolecall.core.rundir import RunDir, write_atomically
from rolecall.rl_runtime import processes
from rolecall.rl_runtime.cluster.ray_commands import (
    LIFELINE,
    LOOPBACK,
    gcs_command,
    ray_environment,
    raylet_command,
    store_folder,
)
from rolecall.rl_runtime.device import VISIBLE_DEVICES
from rolecall.rl_runtime.processes import kill_process, start_process
from rolecall.rl_runtime.protocol.spawn import NAMESPACE

logger = logging.getLogger(__name__)

GCS_SECONDS = 30.0
NODES_SECONDS = 60.0
STAGGER_SECONDS = 0.05
"""Delay between two raylets: raylets started simultaneously on one file system sometimes crash."""
POLL_SECONDS = 0.02
STOP_SECONDS = 5.0
NONE_FOR_NONE = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
"""An actor that requests no GPU sees none of its node's."""


@dataclass(slots=True)
class RayProcess:
    """A Ray process that this cluster started."""

    process: subprocess.Popen[bytes]
    start_ticks: int

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@dataclass
class Cluster:
    """The Ray processes of one run. Only the process that started the cluster may connect through it."""

    run: RunDir
    nodes: Sequence[NodeId]
    clock: Clock = field(default_factory=SystemClock)
    gpus: Mapping[NodeId, Sequence[str]] = field(default_factory=dict)  # by node; empty: none computes on GPUs
    address: str = ""
    raylets: dict[NodeId, RayProcess] = field(default_factory=dict)
    gcs: RayProcess | None = None
    _temp: Path = Path()
    _connected: bool = False
    _lifeline: int | None = None

    def start(self) -> None:
        """Starts GCS and raylets, and waits until every node is a member.

        Raises:
            ActuatorError: a Ray process ended; the end of its log is in the message.
            DeadlineExceeded: GCS or nodes did not come up.
        """
        os.environ.update(ray_environment(self.run))
        _apply_settings()
        import ray  # only now: it reads its settings at import

        self._make_folders()
        node_ids = {node: os.urandom(28).hex() for node in self.nodes}
        head_id = node_ids[self.nodes[0]]
        argv = gcs_command(node_id=head_id, session=self._session, logs=self._logs, commit=ray.__commit__)
        self.gcs = self._start("gcs", argv, self.nodes[0])
        self.address = f"{LOOPBACK}:{self._gcs_port(head_id)}"
        cluster_id = self._introduce()
        for number, node in enumerate(self.nodes):
            self.raylets[node] = self._start_raylet(node, node_ids[node], cluster_id, head=number == 0)
            self.clock.sleep(STAGGER_SECONDS)
        self._wait_for_nodes()

    def connect(self) -> None:
        """Makes this process a driver of the cluster."""
        import ray

        _keep_ray_quiet()
        # Ray adds the driver's working directory to its workers' import path: h2.py there would shadow a library.
        with _own_signal_handlers(), chdir(self._temp):
            ray.init(
                address=self.address,
                namespace=NAMESPACE,
                _node_ip_address=LOOPBACK,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        self._connected = True

    def dead_nodes(self) -> list[NodeId]:
        """Nodes whose raylet has ended."""
        return [node for node, raylet in self.raylets.items() if not raylet.alive]

    @property
    def gcs_alive(self) -> bool:
        return self.gcs is not None and self.gcs.alive

    def stop(self) -> None:
        """Ends every Ray process; workers end with their raylet. Idempotent."""
        if self._connected:
            import ray

            self._connected = False
            # A partially dead cluster may reject the disconnect; its processes are killed below regardless.
            try:
                with _own_signal_handlers():
                    ray.shutdown()
            except Exception:
                # Deliberate: the processes must be killed below, whatever Ray raises here.
                logger.exception("disconnecting from Ray failed")
        started = [*self.raylets.values(), *([self.gcs] if self.gcs else [])]
        # SIGTERM makes a raylet drain for seconds. Its state is not kept, so SIGKILL loses nothing.
        for s in started:
            kill_process(s.process.pid, s.start_ticks, signal.SIGKILL)
        deadline = self.clock.monotonic() + STOP_SECONDS
        while any(s.alive for s in started) and self.clock.monotonic() < deadline:
            self.clock.sleep(POLL_SECONDS)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._temp != Path():
            shutil.rmtree(self._temp.parent, ignore_errors=True)

    @property
    def _session(self) -> Path:
        return self._temp / "session_rolecall"  # short: a Unix socket's path holds 107 characters

    @property
    def _logs(self) -> Path:
        return self.run.logs / "ray"

    def _make_folders(self) -> None:
        # Ray makes its own folder world-accessible; the parent folder stays private.
        private = Path(tempfile.mkdtemp(prefix=processes.RAY_DIR_PREFIX))
        (self.run.path / "ray_dir").write_text(str(private))
        self._temp = private / "t"
        self._temp.mkdir()
        for sub in ("sockets", "runtime_resources"):
            (self._session / sub).mkdir(parents=True)
        os.mkfifo(self._temp / LIFELINE, 0o600)
        # Only this process holds the write end (Linux allows opening both ends): readers get EOF when it exits.
        self._lifeline = os.open(self._temp / LIFELINE, os.O_RDWR | os.O_CLOEXEC)
        self._logs.mkdir(parents=True, exist_ok=True)
        (self._session / "logs").symlink_to(self._logs)

    def _start(self, name: str, argv: list[str], node: NodeId, **environment: str) -> RayProcess:
        log = self._logs / f"{name}.console"
        process, ticks = start_process(
            self.run, name, argv, log, node=node, cwd=self._temp, RAY_BACKEND_LOG_LEVEL="warning", **environment
        )
        if ticks is None:
            raise ActuatorError(f"{name} ended at once with code {process.wait()}{self._log_end(name)}")
        return RayProcess(process=process, start_ticks=ticks)

    def _gcs_port(self, node_id: str) -> int:
        """The free port that GCS chose and wrote to a file."""
        path, deadline = self._session / f"gcs_server_port_{node_id}", self.clock.monotonic() + GCS_SECONDS
        while True:
            text = path.read_text().strip() if path.exists() else ""
            if text.isdigit():
                return int(text)
            if not self.gcs_alive:
                raise ActuatorError(f"Ray's GCS ended while it started{self._log_end('gcs')}")
            if self.clock.monotonic() > deadline:
                raise DeadlineExceeded(waited_for="the port of Ray's GCS", seconds=GCS_SECONDS)
            self.clock.sleep(POLL_SECONDS)

    def _introduce(self) -> str:
        """Registers the head node with GCS, which must precede other nodes; returns the cluster's id."""
        from ray._common.usage import usage_lib

        client = _ray_internals().GcsClient(address=self.address)
        client.internal_kv_put(b"session_name", self._session.name.encode(), False, b"session")
        # Ray and Python versions, which drivers compare with their own. Nothing is reported externally.
        usage_lib.put_cluster_metadata(client, ray_init_cluster=False)
        return str(client.cluster_id.hex())

    def _start_raylet(self, node: NodeId, node_id: str, cluster_id: str, *, head: bool) -> RayProcess:
        # Without these files a raylet waits for its Python agents to write their ports, and exits on timeout.
        for what in ("dashboard_agent_listen", "metrics_agent", "metrics_export", "runtime_env_agent"):
            (self._session / f"{what}_port_{node_id}").write_text("0")
        argv = raylet_command(
            node=node,
            node_id=node_id,
            cluster_id=cluster_id,
            gcs_address=self.address,
            session=self._session,
            logs=self._logs,
            store=store_folder(len(self.nodes), self._temp),
            head=head,
            num_gpus=len(self.gpus.get(node, ())),
        )
        visible = {VISIBLE_DEVICES: ",".join(self.gpus.get(node, ())), **NONE_FOR_NONE} if self.gpus else {}
        started = self._start(f"raylet-{node}", argv, node, **visible)
        folder = self.run.node_dir(node)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            folder / "raylet.json", f'{{"pid": {started.process.pid}, "start_ticks": {started.start_ticks}}}\n'
        )
        return started

    def _wait_for_nodes(self) -> None:
        client: Any = _ray_internals().GcsClient(address=self.address)
        deadline = self.clock.monotonic() + NODES_SECONDS
        while True:
            members = {
                str(n.node_name) for n in client.get_all_node_info(timeout=NODES_SECONDS).values() if n.state == 0
            }
            missing = [node for node in self.nodes if node not in members]
            if not missing:
                return
            for node in self.dead_nodes():
                raise ActuatorError(f"the raylet of {node} ended while it started{self._log_end(f'raylet-{node}')}")
            if self.clock.monotonic() > deadline:
                raise DeadlineExceeded(waited_for=f"Ray nodes {', '.join(missing)}", seconds=NODES_SECONDS)
            self.clock.sleep(POLL_SECONDS)

    def _log_end(self, name: str) -> str:
        path = self._logs / f"{name}.console"
        text = path.read_text(errors="replace")[-1500:].strip() if path.exists() else ""
        return f"; the end of {path}:\n{text}" if text else f"; see {self._logs}"


def _apply_settings() -> None:
    """Makes Ray reload its settings, which it reads at import; this process may have imported it earlier."""
    if "ray" not in sys.modules:
        return
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    internals = _ray_internals()
    internals.Config.initialize("")
    internals.AuthenticationTokenLoader.instance().reset_cache()


def _ray_internals() -> Any:
    """Ray's compiled module, which has no type information."""
    return import_module("ray._raylet")


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Restores our handlers for SIGTERM and SIGINT, which Ray replaces with its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep_ray_quiet() -> None:
    """Redirects Ray's messages to our log: Ray prints every worker death to the driver's terminal, whatever
    `log_to_driver` says. The journal records deaths with their reason.
    """
    from ray._private import worker

    def log(data: Any, *_: Any, **__: Any) -> None:
        logger.info("ray: %s", " ".join(data.get("lines", ()))[:500])

    worker.print_to_stdstream = log
