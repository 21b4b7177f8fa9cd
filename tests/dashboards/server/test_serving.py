"""`rolecall dashboard` as an operator starts it: its output, which requests it accepts, and how it ends."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rolecall.cli.main import main
from rolecall.dashboards.server import serving
from tests.dashboards.made_runs import MadeRun
from tests.support import PATIENCE_SECONDS, eventually


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "runs")


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["dashboard", *args]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing"], "nothing: no run of this name"),
        (["made", "--journal", "sqlite:////x.db"], "give one of the two"),
        (["--journal", "mysql://a:s3cret@h/x"], "mysql is not supported"),
        (["--journal", "-"], "ROLECALL_JOURNAL_URL is not set"),
        (["made", "--prometheus", "ftp://x"], "--prometheus: expected http"),
        (["made", "--prometheus", "http://u:s3cret@h:9090"], "credentials do not belong into a URL"),
        (["made", "--credentials", "/none"], "--credentials: needs --prometheus"),
        (["made", "--prometheus", "http://h:9090", "--credentials", "/none"], "No such file"),
        (["made", "--host", "0.0.0.0"], "--users FILE"),
        (["made", "--host", "no.such.host.invalid"], "--users FILE"),
        (["made", "--host", "no.such.host.invalid", "--open-to-readers"], "cannot resolve"),
        (["made", "--users", "/none"], "/none"),
        (["made", "--tls-cert", "/none"], "give both"),
        (["made", "--tls-cert", "/none", "--tls-key", "/none"], "cannot use /none"),
        (["made", "--origin", "*"], "--origin: expected"),
    ],
)
def test_wrong_usage_is_one_sentence(
    made: MadeRun, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    err = refused(capsys, *args, "--runs", str(made.root), "--port", "0")
    assert said in err and "s3cret" not in err and "Traceback" not in err


def test_a_port_that_is_taken(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"--port: {port} is in use" in refused(capsys, "made", "--runs", str(made.root), "--port", port)


class Served:
    """A dashboard in a process of its own."""

    def __init__(self, folder: Path, args: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._log = folder / "dashboard.log"
        argv = [sys.executable, "-m", "rolecall", "dashboard", *args, "--port", "0"]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                argv, cwd=folder, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
            )
        eventually(self._announced, "the address is reported")
        (word,) = [w for w in self.output().split() if w.startswith("http")][:1]
        self.netloc = urlsplit(word).netloc

    def _announced(self) -> bool:
        assert self.process.poll() is None, self.output()
        return "http" in self.output()

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(self, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.netloc, timeout=PATIENCE_SECONDS)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer

    def web_socket(self, origin: str) -> int:
        """Status of an attempt to open the page's own connection from a page of `origin`."""
        headers = {
            "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Origin": origin,
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }  # fmt: skip
        connection = http.client.HTTPConnection(self.netloc, timeout=PATIENCE_SECONDS)
        connection.request("GET", "/_stcore/stream", headers=headers)
        status = connection.getresponse().status
        connection.close()
        return status


@contextlib.contextmanager
def served(folder: Path, *args: str, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    found = Served(folder, args, env)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait(PATIENCE_SECONDS)


@pytest.mark.slow
def test_it_serves_on_loopback_shows_no_secret_and_ends_at_once(made: MadeRun, tmp_path: Path) -> None:
    url = f"{made.run.database_url}?password=s3cret"
    with served(tmp_path, "--journal", "-", env={"ROLECALL_JOURNAL_URL": url}) as dashboard:
        answer = dashboard.ask("/")
        assert answer.status == 200
        assert (
            answer.headers["X-Frame-Options"] == "DENY"
            and "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        )
        assert dashboard.ask("/_stcore/health").status == 200
        assert dashboard.netloc.startswith("127.0.0.1:")
        assert dashboard.web_socket(f"http://{dashboard.netloc}") == 101
        assert dashboard.web_socket("http://evil.example") != 101  # a page of somebody else
        assert "s3cret" not in Path(f"/proc/{dashboard.process.pid}/cmdline").read_text()
        dashboard.process.send_signal(signal.SIGINT)
        assert dashboard.process.wait(PATIENCE_SECONDS) == 130
        assert "s3cret" not in dashboard.output() and "Traceback" not in dashboard.output()


@pytest.mark.slow
def test_beyond_loopback_with_people_and_sigterm(made: MadeRun, tmp_path: Path) -> None:
    people = tmp_path / "users.yaml"
    people.write_text("")
    people.chmod(0o600)
    args = ("made", "--runs", str(made.root), "--host", "0.0.0.0", "--users", str(people))
    with served(tmp_path, *args) as dashboard:
        assert "sign in with your access token to read and give commands" in dashboard.output()
        assert "not encrypted" in dashboard.output()
        dashboard.process.send_signal(signal.SIGTERM)
        assert dashboard.process.wait(PATIENCE_SECONDS) in (-signal.SIGTERM, 143, 0)
        assert "Traceback" not in dashboard.output()


def test_a_failing_page_is_logged_without_passwords(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):  # as often as the page is drawn again
        try:
            raise RuntimeError("postgresql://anna:s3cret@db/x is away \x1b[2J")
        except RuntimeError as e:
            assert serving._report_error(e)  # Streamlit shows nothing of its own
    assert "RuntimeError" in caplog.text and "anna:***@db" in caplog.text and "s3cret" not in caplog.text
    assert "\x1b" not in caplog.text
    assert len([r for r in caplog.records if r.name == serving.__name__]) == 1


def test_without_streamlit_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['streamlit'] = None; from rolecall.cli.main import main; "
        "sys.exit(main(['dashboard', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 2 and "pip install '.[dashboards]'" in done.stderr
