"""A real Prometheus for tests: its own data directory, loopback only, one second between scrapes."""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support import PATIENCE_SECONDS, eventually

SCRAPE_SECONDS = 1


class PrometheusServer:
    """Scrapes its targets. Root may run it; it opens one port and writes below `folder`."""

    def __init__(
        self,
        program: str,
        folder: Path,
        *options: str,
        targets: Sequence[str],
        itself: Sequence[Mapping[str, str]],
        config: Path | None,
    ) -> None:
        """`targets`: `host:port` of each. `itself`: it scrapes itself as so many more, each with these labels.
        `config`: the file instead of both."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.netloc, self._folder = f"127.0.0.1:{port}", folder
        scraped = [(n, dict[str, str]()) for n in targets] + [(self.netloc, dict(labels)) for labels in itself]
        static = [{"targets": [n], "labels": labels} for n, labels in scraped]
        made = {
            "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"},
            "scrape_configs": [{"job_name": "rolecall", "static_configs": static}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(made))  # JSON is YAML
        argv = [
            program,
            f"--config.file={config or folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
        ]
        argv += [f"--web.listen-address={self.netloc}", "--log.level=warn", *options]
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        return f"http://{self.netloc}"

    def ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
        with contextlib.suppress(OSError):
            return self._get("/-/ready")[0] == 200
        return False

    def count(self, expression: str) -> int:
        """How many series an instant query gives now."""
        status, body = self._get(f"/api/v1/query?query={quote(expression)}")
        assert status == 200, body
        return len(json.loads(body)["data"]["result"])

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.netloc, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)


@contextlib.contextmanager
def prometheus(
    folder: Path,
    *options: str,
    targets: Sequence[str] = (),
    itself: Sequence[Mapping[str, str]] = (),
    config: Path | None = None,
) -> Iterator[PrometheusServer]:
    """A server that answers; skips the test where Prometheus is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no Prometheus here: the Debian package `prometheus` has it")
    server = PrometheusServer(program, folder, *options, targets=targets, itself=itself, config=config)
    try:
        eventually(server.ready, "Prometheus is ready")
        yield server
    finally:
        server.close()
