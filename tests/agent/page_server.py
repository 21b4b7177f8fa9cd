"""A server on loopback that serves a page of metrics, as badly as a test wants."""

import socket
import threading
from collections.abc import Callable

Answer = Callable[[socket.socket], None]


def http_page(body: str | bytes, status: str = "200 OK", *headers: str) -> bytes:
    raw = body.encode() if isinstance(body, str) else body
    head = "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(raw)}", *headers))
    return f"{head}\r\n\r\n".encode() + raw


class PageServer:
    """`answer`: bytes that are sent, or what is done with each connection. `heads`: requests as they came."""

    def __init__(self, answer: bytes | Answer = b"") -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.ending = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def show(self, body: str | bytes) -> None:
        self.answer = http_page(body)

    def close(self) -> None:
        self.ending.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        except OSError:
            pass  # closed already
        self._socket.close()
        self._thread.join()

    def drip(self, connection: socket.socket) -> None:
        """A byte each 10 ms, of a head that never ends."""
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while not self.ending.wait(0.01):
            connection.sendall(b"x")

    def hang(self, connection: socket.socket) -> None:
        self.ending.wait()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(4096) or b"\r\n\r\n"
                self.heads.append(head)
                if callable(self.answer):
                    self.answer(connection)
                else:
                    connection.sendall(self.answer)
            except OSError:
                pass  # who asked has gone: that is what some tests are about
