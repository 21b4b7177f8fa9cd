"""A notification service on loopback: answers with what it is told to, and remembers what it got."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


class Service:
    def __init__(self) -> None:
        self.got: list[Received] = []
        self.answers: list[tuple[int, str]] = []  # status and body of the next answers; 200 when empty
        self.location = ""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or "null")
                headers = {k.lower(): v for k, v in self.headers.items()}
                service.got.append(Received(method=self.command, path=self.path, headers=headers, body=body))
                status, text = service.answers.pop(0) if service.answers else (200, "ok")
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", service.location)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _answer

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def serving() -> Iterator[Service]:
    service = Service()
    try:
        yield service
    finally:
        service.close()
