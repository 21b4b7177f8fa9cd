"""A small agent over HTTP, as good or as bad as a test wants."""

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rolecall.core.columns import PROCESSES
from rolecall.core.telemetry import ProcessSample

NODE = "node-1"


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "process": {"node": NODE, "pid": 42, "start_ticks": 7},
        "role": "rollout",
        "replica": "rollout/1",
        "rank": 0,
        "incarnation": 1,
        "at": 10.0,
        "wall_at": 1_700_000_010.0,
        "alive": True,
        "page_ok": True,
        "phase": "generate",
        **changes,
    }


@dataclass
class FakeAgent:
    """Answers like rolecall.agent. `bad` by path: bytes sent instead of the JSON, a status, or "drip", "silent".
    `block`: sent as its process samples instead of `samples`, right or wrong."""

    agent_pid: int = 1
    port: int = 0
    samples: list[dict[str, Any]] = field(default_factory=lambda: [sample()])
    block: dict[str, Any] | None = None
    bad: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # in the head of every answer
    names_last: bool = True
    """False: as agents that do not tell the time of the event that was read last."""
    connections: int = 0

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.released = threading.Event()
        agent = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                agent.connections += 1

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                agent.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def add_event(self, kind: str = "exited", **changes: Any) -> None:
        with self.changed:
            self.events.append(
                {
                    "seq": len(self.events) + 1,
                    "kind": kind,
                    "node": NODE,
                    "at": 11.0,
                    "wall_at": 1_700_000_011.0,
                    "process": {"node": NODE, "pid": 42, "start_ticks": 7},
                    "role": "rollout",
                    "replica": "rollout/1",
                    "incarnation": 1,
                    "detail": {"signal": "9"},
                    **changes,
                }
            )
            self.changed.notify_all()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append(handler.path)
        parts = urlsplit(handler.path)
        query = {k: v[0] for k, v in parse_qs(parts.query).items()}
        bad = self.bad.get(parts.path)
        if bad == "silent":
            self.released.wait(30)
        if bad == "drip":
            self.drip(handler)
            return
        status, location = (bad, "/elsewhere") if isinstance(bad, int) else (200, "")
        if isinstance(bad, bytes):
            body = bad
        else:
            body = b"" if isinstance(bad, int) else json.dumps(self.value(parts.path, query)).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        if location:
            handler.send_header("Location", location)
        handler.end_headers()
        handler.wfile.write(body)

    def drip(self, handler: BaseHTTPRequestHandler) -> None:
        """One header byte now and then: no single read ever times out."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Padding: ")
        while not self.released.wait(0.05):
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    def value(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        head = {"node": NODE, "agent_pid": self.agent_pid, "lost": 0, "at": 12.0, "wall_at": time.time(), **self.extra}
        after = int(query["after"])
        with self.changed:
            self.changed.wait_for(lambda: len(self.events) > after, float(query["wait"]))
            head |= {"newest": len(self.events), "events": self.events[after:]}
            if self.names_last and 0 < after <= len(self.events):
                head["after_wall_at"] = self.events[after - 1]["wall_at"]
        if path == "/v1/news":
            head |= {"cursor": 100, "samples_lost": 0}
            if query["since"] == "0" and (self.block or self.samples):
                whole = self.block or PROCESSES.encode([ProcessSample.from_dict(s) for s in self.samples])
                head["processes"] = whole
        return head
