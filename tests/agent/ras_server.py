"""A stand-in for NCCL's RAS on loopback: speaks its line protocol, and misbehaves on command."""

import socket
import threading
from collections.abc import Callable, Iterable

from tests.support import PATIENCE_SECONDS

Serve = Callable[[socket.socket], None]


def lines(connection: socket.socket) -> Iterable[str]:
    buffer = b""
    while part := connection.recv(4096):
        buffer += part
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            yield line.decode()


def answers(body: bytes, *, text: bytes | None = None, knows_json: bool = True, num_bytes: int = 1 << 20) -> Serve:
    """Serves `body` as JSON, `text` as text, in pieces of `num_bytes`."""

    def serve(connection: socket.socket) -> None:
        form = "text"
        for line in lines(connection):
            if line.startswith("CLIENT PROTOCOL"):
                connection.sendall(b"SERVER PROTOCOL 2\n")
            elif line.startswith("TIMEOUT"):
                connection.sendall(b"OK\n")
            elif line == "SET FORMAT json":
                form = "json" if knows_json else "text"
                connection.sendall(b"OK\n" if knows_json else b"ERROR: Unknown command SET FORMAT json\n")
            elif line == "VERBOSE STATUS":
                whole = body if form == "json" or text is None else text
                for at in range(0, len(whole), num_bytes):
                    connection.sendall(whole[at : at + num_bytes])
                return

    return serve


class RasServer:
    """Answers each connection by `serve`, which a test may change; `num_asked` counts them."""

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.num_asked = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.num_asked += 1
            with connection:
                try:
                    connection.settimeout(PATIENCE_SECONDS)
                    self.serve(connection)
                except OSError:
                    pass  # the client gave up

    def close(self) -> None:
        if self._listening.fileno() < 0:
            return
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(PATIENCE_SECONDS)
