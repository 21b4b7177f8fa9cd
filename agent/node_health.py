"""Whether this node is fit to run ranks, as NVRx asks before its ranks rendezvous
(`ft_launcher --ft-node-health-check-endpoint SOCKET`), over gRPC on a Unix socket.

Unfit is a node whose own events show a hardware fault that stands (those for which the detector names a node), or of
which a watch says that nothing may start there. A watch that does not answer is no reason, nor is the crash of a rank:
NVRx leaves out a node of which it is told that it is unfit. Without an answer from here it takes the node for healthy.

The service is `nvhcd.HealthCheckService.RunHealthCheck` of NVRx's nvhcd.proto. The request has arguments for a script
(`--no-slurm`), which mean nothing here. The response says: success (1), exit code (2), JSON with `fail_count` and
`failed_checks` (3), and an error (4). Four fields need no generated code.
"""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable
from rolecall.agent.data_dir import remove
from rolecall.agent.events import EventLog
from rolecall.core.clock import Clock
from rolecall.core.faults import FaultClass
from rolecall.core.http import HttpFailed, request
from rolecall.core.ids import NodeId
from rolecall.core.text import plain
from rolecall.formats.node_faults import NodeFaults

logger = logging.getLogger(__name__)

SERVICE, METHOD = "nvhcd.HealthCheckService", "RunHealthCheck"
WATCH_SECONDS = 3.0
"""For the watch's answer; NVRx waits 60 s for ours."""
WATCH_BYTES_MAX = 1 << 20
NUM_REASONS_MAX = 20
REASON_CHARACTERS = 300
NUM_THREADS = 4
STOP_SECONDS = 1.0
RETRY_SECONDS = 60.0
"""Until the package or the socket's folder is there."""
BOOT_MARGIN_SECONDS = 30.0
"""The clock may be set after the boot; no agent writes for as long before one."""
SOCKET_MODE = 0o666
"""Any user of the node may ask: the answer says no more than `/metrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitness:
    """`unfit`: reasons why no rank should start here; none: it is fit. `notes`: what could not be asked."""

    unfit: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def encoded(self) -> bytes:
        """As a `HealthCheckResponse`."""
        value = {"fail_count": len(self.unfit), "failed_checks": [*self.unfit], "notes": [*self.notes]}
        output, error = json.dumps(value).encode(), "; ".join(self.unfit).encode()
        success = b"" if self.unfit else b"\x08\x01"  # proto3 leaves zeros out
        exit_code = b"\x10\x01" if self.unfit else b""
        return b"".join((success, exit_code, _text(3, output), _text(4, error)))


def _text(number: int, text: bytes) -> bytes:
    """A length-delimited field of a protobuf message; none if it is empty."""
    if not text:
        return b""
    length, size = len(text), bytearray()
    while length > 0x7F:
        size.append(0x80 | length & 0x7F)
        length >>= 7
    return bytes((number << 3 | 2, *size, length)) + text


class NodeFitness:
    """Follows the node's events. For one caller at a time."""

    def __init__(
        self,
        events: EventLog,
        clock: Clock,
        ask_watch: Callable[[], Sequence[str]] | None = None,
        *,
        booted_wall: float = 0.0,
    ) -> None:
        """`ask_watch`: its reasons against this node. It raises HttpFailed: no answer; ValueError: another one. None:
        no watch is asked. `booted_wall`: when the node booted, wall seconds: earlier faults are over, or are reported
        again."""
        self._events, self._clock, self._ask_watch = events, clock, ask_watch
        self._since = booted_wall - BOOT_MARGIN_SECONDS
        self._faults, self._seq = NodeFaults(), 0
        self._complaint = ""

    def now(self) -> Fitness:
        while (page := self._events.after(self._seq)).events:
            for event in page.events:
                if event.wall_at >= self._since:
                    self._faults.take(event, event.wall_at)
            self._seq = page.events[-1].seq
        wall = self._clock.wall()
        self._faults.expire(wall)
        own = [f.because for f in self._faults.standing(wall) if FaultClass(f.fault_class).spec.is_hardware]
        said, notes = self._of_watch()
        reasons = tuple(plain(text, REASON_CHARACTERS) for text in dict.fromkeys((*own, *said)))
        return Fitness(unfit=reasons[:NUM_REASONS_MAX], notes=notes)

    def _of_watch(self) -> tuple[Sequence[str], tuple[str, ...]]:
        if self._ask_watch is None:
            return (), ()
        complaint, said = "", tuple[str, ...]()
        try:
            said = tuple(self._ask_watch())
        except (HttpFailed, ValueError) as e:
            complaint = plain(f"the watch was not heard: {e}", REASON_CHARACTERS)
        if complaint and complaint != self._complaint:  # once, not at each health check
            logger.warning("%s", complaint)
        self._complaint = complaint
        return said, (complaint,) if complaint else ()


def booted_wall(proc: Path, clock: Clock) -> float:
    """Wall seconds. 0: not known."""
    try:
        return clock.wall() - float((proc / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


def ask_watch(url: str, node: NodeId) -> tuple[str, ...]:
    """The reasons of a watch (`/v1/unfit`). Raises HttpFailed: no answer; ValueError: another one."""
    answer = request(
        "GET",
        f"{url.rstrip('/')}/v1/unfit?{urlencode({'node': node})}",
        deadline_seconds=WATCH_SECONDS,
        bytes_max=WATCH_BYTES_MAX,
    )
    if answer.status != 200:
        raise ValueError(f"{url} answers with status {answer.status}")
    try:
        value = json.loads(answer.body)
    except RecursionError:
        raise ValueError(f"{url}: the answer is nested too deeply") from None
    reasons = value.get("unfit") if isinstance(value, dict) else None
    if not isinstance(reasons, list) or not all(isinstance(text, str) for text in reasons):
        raise ValueError(f"{url}: the answer has no list `unfit`")
    return tuple(reasons)


class HealthServer:
    """A collector that reads nothing: it answers from its first `read` to `close`. Where it cannot, its probe is down
    and all else of the agent works: NVRx takes a node without an answer for healthy, and a node without an agent has no
    other signals either."""

    name = "node_health"
    interval_seconds = RETRY_SECONDS

    def __init__(self, socket: Path, fitness: NodeFitness) -> None:
        self._socket, self._fitness, self._one = socket, fitness, threading.Lock()
        self._server: Any = None

    def read(self, at: float) -> CollectorReading:
        if self._server is None:
            self._server = self._started()
        return CollectorReading()

    def close(self) -> None:
        if self._server is not None:
            self._server.stop(grace=None).wait(STOP_SECONDS)
            remove(self._socket)

    def _started(self) -> Any:
        """Raises CollectorUnavailable: grpcio is not installed, or the socket cannot be made."""
        try:
            import grpc
        except ImportError:
            because = "node_health needs the package grpcio: pip install 'rolecall[agent,nvrx]'"
            raise CollectorUnavailable(because) from None
        handler = grpc.unary_unary_rpc_method_handler(self._answer)  # bytes in and out
        server = grpc.server(futures.ThreadPoolExecutor(NUM_THREADS, "node health"))
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})])
        try:
            self._socket.parent.mkdir(parents=True, exist_ok=True)
            bound = server.add_insecure_port(f"unix://{self._socket.absolute()}")
            if not bound:
                raise RuntimeError("not bound")
            self._socket.chmod(SOCKET_MODE)
        except (RuntimeError, OSError) as e:
            because = f"node_health.socket: {self._socket}: cannot listen there: {plain(e, REASON_CHARACTERS)}"
            raise CollectorUnavailable(because) from None
        server.start()
        return server

    def _answer(self, _request: bytes, _context: Any) -> bytes:
        with self._one:
            return self._fitness.now().encoded()
