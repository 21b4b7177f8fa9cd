"""`rolecall watch agents` over HTTPS and with users: the addresses, the names, and the source itself."""

import ssl
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.config.watched import parse_watched
from rolecall.core.errors import ConfigError
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import bearer_token, open_run_dir
from rolecall.detector.sources.agents import AgentsSource
from rolecall.watch.agents import listed, named_agents, node_of, observing_run
from tests.agent.http.test_web_config import HASH, PASSWORD, basic, certificate
from tests.agent.test_settings import QUIET, running
from tests.events import filled
from tests.support import eventually


def test_an_agent_with_tls_and_users_is_named_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate(tmp_path)
    (tmp_path / "web.yml").write_text(
        f"tls_server_config: {{cert_file: node.crt, key_file: node.key}}\nbasic_auth_users: {{watch: {HASH}}}\n"
    )
    file = {"node": "node-7", "port": 0, "data_dir": str(tmp_path / "data"), "web_config_file": "web.yml", **QUIET}
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(file))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "node.crt"))
    with running(tmp_path / "agent.yaml") as url:
        url = url.replace("127.0.0.1", "localhost")  # the name that its certificate has
        bearer = f"Bearer {bearer_token((tmp_path / 'data' / 'token').read_text().strip())}"
        with pytest.raises(ConfigError, match="--credentials"):
            named_agents(listed(url))
        for header in (basic("watch", PASSWORD), bearer):
            assert named_agents(listed(url), lambda u, h=header: node_of(u, h)) == {"node-7": url}
            source = AgentsSource(lambda: {"node-7": url}, SystemClock(), 0.1, authorization=header)
            source.start()
            try:
                eventually(lambda s=source: bool(s.poll(0.1).batches), "samples arrive")
            finally:
                source.close()
        nobody = AgentsSource(lambda: {"node-7": url}, SystemClock(), 0.1)
        trusts_none = AgentsSource(
            lambda: {"node-7": url},
            SystemClock(),
            0.1,
            authorization=bearer,
            tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )
        for source, reason in ((nobody, "status 401"), (trusts_none, "CERTIFICATE")):
            source.start()
            try:
                eventually(lambda s=source, r=reason: r in str(s.poll(0.1).unreachable), reason)
            finally:
                source.close()


@pytest.mark.parametrize("text", ["ftp://a:1,http://b:2", "https://", "http://a:99999", "https://[::1"])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="neither"):
        listed(text)


def test_names_of_nodes_have_no_capitals_as_their_agents_have_it() -> None:
    assert named_agents(["GPU-1=http://GPU-1:9477"]) == {"gpu-1": "http://GPU-1:9477"}


def test_a_run_tells_a_watch_file_without_an_actuator_from_none(tmp_path: Path) -> None:
    """A page says either that no watch file was given, or that it names no actuator."""
    assert observing_run(tmp_path, "none", {}).read()["watched"] is None
    assert observing_run(tmp_path, "file", {}, watched=parse_watched({})).read()["watched"]["actuator"] is None


def test_a_watched_run_stays_as_old_as_it_is_when_its_agents_change(tmp_path: Path) -> None:
    clock = FakeClock()
    created_at = observing_run(tmp_path, "older", {}, clock=clock).read()["created_at"]
    assert created_at == clock.wall()
    clock.advance(1)
    observing_run(tmp_path, "newer", {}, clock=clock)
    clock.advance(1)
    assert observing_run(tmp_path, "older", {"n": "http://a:1"}, clock=clock).read()["created_at"] == created_at
    assert open_run_dir(tmp_path, "latest").run_id == "newer"


def test_the_watch_file_says_where_the_journal_is(tmp_path: Path) -> None:
    file = parse_watched({"journal": f"sqlite:///{tmp_path}/elsewhere.db"})
    run = observing_run(tmp_path, "job", {"n": "http://a:1"}, watched=file)
    assert run.database_url == file.journal and (tmp_path / "elsewhere.db").exists()
    assert not (run.path / "journal.db").exists()
    assert observing_run(tmp_path, "job", {}, watched=file).path == run.path
    assert observing_run(tmp_path, "job", {}).database_url == file.journal, "as it was without a watch file"
    with pytest.raises(ConfigError, match=r"'job' has its journal at sqlite:.*elsewhere\.db; another journal needs"):
        observing_run(tmp_path, "job", {}, watched=parse_watched({"journal": f"sqlite:///{tmp_path}/other.db"}))


def test_a_file_with_the_journal_of_another_run_is_refused_and_leaves_no_run(tmp_path: Path) -> None:
    file = parse_watched({"journal": f"sqlite:///{tmp_path}/elsewhere.db"})
    with closing(Journal(observing_run(tmp_path, "job", {}, watched=file).database_url)) as journal:
        journal.append(filled(EventKind.LEASE_ACQUIRED))
    with pytest.raises(ConfigError, match=r"elsewhere\.db holds the journal of another run"):
        observing_run(tmp_path, "second", {}, watched=file)
    assert not (tmp_path / "second").exists()


def test_a_journal_that_a_watch_file_cannot_have_is_its_problem() -> None:
    with pytest.raises(ConfigError, match="journal: mysql is not supported"):
        parse_watched({"journal": "mysql://me@host/db"})
