"""A webhook's other end, on loopback: keeps what it is sent, in the order in which it came."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Inbox:
    url: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str, **facts: object) -> list[dict[str, Any]]:
        """Messages of a kind with these facts."""
        kept = list(self.messages)
        return [m for m in kept if m["kind"] == kind and all(m.get(k) == v for k, v in facts.items())]


@contextmanager
def inbox() -> Iterator[Inbox]:
    """Answers every POST with 204 while the block runs."""
    kept = Inbox()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.messages.append(json.loads(body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    kept.url = f"http://127.0.0.1:{server.server_port}/rolecall"
    thread = threading.Thread(target=server.serve_forever, name="inbox", daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
