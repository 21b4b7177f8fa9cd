"""One node's agent: composes the parts, starts them in order and stops them in reverse.

It owns its data directory exclusively (by a lock that the kernel releases at SIGKILL): `agent.json` holds its address,
`agent.sock` takes registrations, `pages/` holds the state pages, `events.jsonl` and `registrations.json` survive a
restart. The main thread samples at each interval; exits, registrations and HTTP have their own threads."""

import fcntl
import hmac
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rolecall.agent.collectors.base import Collector
from rolecall.agent.collectors.engine.activity import ENGINE_PROBES, EngineActivity
from rolecall.agent.collectors.gpu.samples import GPU_PROBES, GpuSamples
from rolecall.agent.collectors.process.exits import ExitStatus, ExitWatch, WatchRefused
from rolecall.agent.collectors.process.host import HostProbe
from rolecall.agent.collectors.runner import Probes
from rolecall.agent.data_dir import (
    PAGES_MODE,
    SOCKET_MODE,
    SOCKET_NAME,
    TOKEN_NAME,
    create_data_dir,
    provide_token,
    remove,
)
from rolecall.agent.disk_space import DiskWatch, disk_space
from rolecall.agent.events import EventLog
from rolecall.agent.evidence import FlightRecorders, Stacks
from rolecall.agent.http.routes import Routes
from rolecall.agent.http.server import HttpServer
from rolecall.agent.registration_socket import RegistrationServer
from rolecall.agent.registry import Registry
from rolecall.agent.samples import Sampler, SampleRing
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.descriptors import is_readable
from rolecall.core.errors import RolecallError
from rolecall.core.http import is_loopback
from rolecall.core.ids import NodeId, ProcessId, process_start_ticks
from rolecall.core.rundir import bearer_token, write_atomically
from rolecall.core.telemetry import AgentEventKind
from rolecall.core.text import os_reason

if TYPE_CHECKING:
    import ssl

    from rolecall.agent.node_health import HealthServer

logger = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 1.0
"""Between two looks at `raylet.json` and at the disk's space, and two flushes of events to disk."""


class DirectoryInUse(RolecallError):
    def __init__(self, path: Path) -> None:
        self.path = path
        pid, url = _serving(path)
        who = f"another agent (PID {pid}, {url})" if pid else "another agent"
        stop = f"kill {pid}" if pid else "stop it"
        super().__init__(
            f"{path}: {who} uses this directory; one agent serves all jobs of a node. To replace it: {stop}; for a "
            "second one: --data-dir DIR --port PORT"
        )


def _serving(data_dir: Path) -> tuple[int, str]:
    """PID and URL that the agent of this directory wrote; 0 while it starts, or if this user cannot read them."""
    try:
        written = json.loads((data_dir / "agent.json").read_bytes())
        return int(written["pid"]), str(written["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    node: NodeId
    data_dir: Path
    token: str
    host: str = "127.0.0.1"
    port: int = 0
    interval_seconds: float = 0.2
    raylet: tuple[int, int] | None = None  # pid, start ticks; else `raylet.json` in the data directory
    parent: tuple[int, int] | None = None  # the agent ends when this process does
    proc: Path = Path("/proc")
    cgroup_root: Path = Path("/sys/fs/cgroup")
    collectors: Callable[[Registry], Sequence[Collector]] | None = None
    """Further collectors; they may look up processes in the registry."""
    tls: "Callable[[], ssl.SSLContext] | None" = None
    allows: Callable[[str], bool] | None = None
    """Accepted values of `Authorization` besides the bearer token; None: reading needs none."""
    group_registers: bool = False
    """Processes of the agent's group may register; else only those of its user."""
    health_socket: Path | None = None
    """Where NVRx's node health check is answered; None: nowhere."""
    health_watch: str = ""
    """URL of the watch that is asked then; empty: none."""


class Agent:
    """`run()` serves until `stop()` is called from a signal handler or another thread."""

    def __init__(self, settings: AgentSettings, clock: Clock | None = None) -> None:
        """Locks the directory and opens everything, but starts nothing.

        Raises:
            DirectoryInUse: another agent uses it.
            OSError: the directory, socket or port is unavailable.
        """
        self._settings, self._clock = settings, clock or SystemClock()
        self._dir = settings.data_dir
        create_data_dir(self._dir)
        (self._dir / "pages").mkdir(exist_ok=True, mode=0o700)
        if settings.group_registers:
            (self._dir / "pages").chmod(PAGES_MODE)
        self._lock = os.open(self._dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise DirectoryInUse(self._dir) from None
        if settings.group_registers:
            try:
                provide_token(self._dir, settings.token)
            except OSError as e:  # a full disk: what is registered already is watched
                logger.warning("no process can register: %s: %s", self._dir / TOKEN_NAME, os_reason(e))
        # Not threading.Event: `set` in a signal handler could deadlock on a lock held by its own thread.
        self._stop_asked = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._disk = DiskWatch()
        self._raylet_complaint = ""
        self._raylet: tuple[int, int] | None = None
        clock = self._clock
        self.events = EventLog(self._dir / "events.jsonl", settings.node, clock)
        self._exits = ExitWatch()  # the real /proc: pidfds refer to this machine whatever `proc` is
        self._host = host = HostProbe(settings.node, proc=settings.proc)
        self.registry = Registry(
            node=settings.node,
            data_dir=self._dir,
            token=settings.token,
            events=self.events,
            exits=self._exits,
            clock=clock,
            oom_kills=host.oom_kills,
            proc=settings.proc,
            cgroup_root=settings.cgroup_root,
        )
        self.ring = SampleRing(settings.node, os.getpid(), clock)
        collectors = settings.collectors(self.registry) if settings.collectors else ()
        self._probes = Probes([*collectors, *self._health_server()], self.events, clock)
        probes, ranks = self._probes, self.registry.registrations
        gpus = GpuSamples(settings.node, lambda: probes.newest(GPU_PROBES), ranks, settings.proc)
        engines = EngineActivity(lambda: probes.newest(ENGINE_PROBES))
        self._sampler = Sampler(self.registry, host, self.ring, clock, gpus.take, engines.fields)
        bearer = bearer_token(settings.token)
        self._routes = Routes(
            node=settings.node,
            clock=clock,
            started_wall=clock.wall(),
            interval_seconds=settings.interval_seconds,
            ring=self.ring,
            events=self.events,
            registry=self.registry,
            sampler=self._sampler,
            stacks=Stacks(clock, settings.proc),
            flight=FlightRecorders(self._dir / "pages", clock, settings.proc),
            bearer=bearer,
            probes=probes,
            gpus=gpus,
            num_malformed=lambda: self._intake.num_malformed,
        )
        self._http = HttpServer(
            settings.host,
            settings.port,
            self._routes.table(),
            tls=settings.tls,
            allows=_bearer_or(settings.allows, bearer) if settings.allows else None,
            public=self._routes.public(),
        )
        answerers = {
            "register": self.registry.register,
            "exception": self.registry.exception,
            "finished": self.registry.finished,
        }
        mode = SOCKET_MODE if settings.group_registers else 0o600
        self._intake = RegistrationServer(self._dir / SOCKET_NAME, answerers, clock, mode)

    def _health_server(self) -> "Iterator[HealthServer]":
        settings = self._settings
        if settings.health_socket is None:
            return
        # Only here: agents of a bundled run import neither httpx nor grpc.
        from rolecall.agent.node_health import HealthServer, NodeFitness, ask_watch, booted_wall

        url, node = settings.health_watch, settings.node
        asks = (lambda: ask_watch(url, node)) if url else None
        booted = booted_wall(settings.proc, self._clock)
        yield HealthServer(settings.health_socket, NodeFitness(self.events, self._clock, asks, booted_wall=booted))

    @property
    def url(self) -> str:
        return self._http.url

    def stop(self) -> None:
        """Asks `run` to end. Safe in a signal handler."""
        os.eventfd_write(self._stop_asked, 1)

    def run(self) -> None:
        """Serves until `stop()`, or until the parent process ends.

        Raises:
            WatchRefused: a process registered before a restart, or the parent, may be alive and cannot be watched.
        """
        try:
            self._start()
            self._loop()
        finally:
            self._shut()

    def _start(self) -> None:
        self.events.append(AgentEventKind.AGENT_STARTED, detail={"pid": str(os.getpid())})
        self._exits.start()
        self._watch_parent()
        self.registry.adopt()
        self._watch_raylet(self._settings.raylet)
        self._sampler.round()
        self._probes.start()
        self._intake.start()
        self._http.start()
        start_ticks = process_start_ticks(os.getpid())
        logger.info("watches node %s, serves at %s", self._settings.node, self.url)
        if self._settings.tls is None and not is_loopback(self._settings.host):
            logger.warning("%s is open to the network without TLS: set web_config_file (TLS and users)", self.url)
        address = {"url": self.url, "pid": os.getpid(), "start_ticks": start_ticks, "node": self._settings.node}
        try:
            write_atomically(self._dir / "agent.json", json.dumps(address) + "\n")
        except OSError as e:  # a full disk; clients that know the port need no such file
            logger.warning(
                "%s: %s; clients cannot discover this agent's address: %s", self._dir / "agent.json", e, self.url
            )

    def _loop(self) -> None:
        interval = self._settings.interval_seconds
        due = housekeeping_due = self._clock.monotonic()
        while not is_readable(self._stop_asked, due - self._clock.monotonic()):
            self._sampler.round()
            now = self._clock.monotonic()
            if now >= housekeeping_due:
                housekeeping_due = now + HOUSEKEEPING_SECONDS
                self._probes.check_hangs()
                self._check_disk()
                self.events.sync()
                if self._settings.raylet is None:
                    self._watch_raylet(self._raylet_in_file())
            # A missed round is skipped, not caught up: samples carry their own times.
            due = max(due + interval, now)

    def _check_disk(self) -> None:
        # A network file system may hang here, as it may in the flush that follows.
        space = disk_space(self._dir, self._settings.proc)
        change = self._disk.poll(space)
        if space is not None and change is not None:
            self.events.append(change, detail=space.detail)

    def _shut(self) -> None:
        remove(self._dir / "agent.json")
        self._http.stop()
        self._intake.stop()
        self._probes.stop()
        self._exits.stop()
        self._host.close()
        self.events.close()
        os.close(self._lock)

    def _watch_parent(self) -> None:
        if self._settings.parent is None:
            return
        pid, start_ticks = self._settings.parent
        try:
            self._exits.watch(pid, start_ticks, self._parent_ended)
        except WatchRefused as e:
            if not e.gone:
                raise
            logger.warning("the parent is gone: %s", e)
            self.stop()

    def _parent_ended(self, status: ExitStatus) -> None:
        logger.warning("the parent process ended: stopping")
        self.stop()

    def _raylet_in_file(self) -> tuple[int, int] | None:
        try:
            value = json.loads((self._dir / "raylet.json").read_bytes())
            return int(value["pid"]), int(value["start_ticks"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as e:
            self._complain(f"raylet.json: {type(e).__name__}: {e}")
            return None

    def _complain(self, of_raylet: str) -> None:
        """Logs once, not every second."""
        if of_raylet != self._raylet_complaint:
            logger.warning("%s", of_raylet)
        self._raylet_complaint = of_raylet

    def _watch_raylet(self, raylet: tuple[int, int] | None) -> None:
        """Watches a raylet once; reports one that has already ended, unless that was reported before a restart."""
        if raylet is None or raylet == self._raylet:
            return
        self._raylet = raylet
        process = ProcessId(node=self._settings.node, pid=raylet[0], start_ticks=raylet[1])
        try:
            self._exits.watch(*raylet, lambda status: self._raylet_ended(process, status))
        except WatchRefused as e:
            if not e.gone:
                self._complain(f"the raylet cannot be watched: {e}")
                self._raylet = None  # retry
            elif not self.events.has(AgentEventKind.RAYLET_EXITED, process):
                self._raylet_ended(process, ExitStatus())

    def _raylet_ended(self, process: ProcessId, status: ExitStatus) -> None:
        self.events.append(AgentEventKind.RAYLET_EXITED, process=process, detail=status.detail())


def _bearer_or(users: Callable[[str], bool], bearer: str) -> Callable[[str], bool]:
    """Whether `Authorization` names a user with the right password, or the bearer token."""
    right = f"Bearer {bearer}".encode()
    return lambda header: hmac.compare_digest(header.encode("utf-8", "replace"), right) or users(header)
