"""Pushing dashboards to a strict stand-in of Grafana over real HTTP. No real Grafana was asked."""

import contextlib
import gc
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.errors import ConfigError
from rolecall.dashboards.grafana.push import MESSAGE, PushPlan, PushRejected, PushResult, holds, plan, push
from rolecall.dashboards.grafana.server import GrafanaRefused, Server, Token, address
from tests.agent.http.test_web_config import certificate
from tests.dashboards.grafana.fake_grafana import EDITOR, VIEWER, FakeGrafana, Refused, fake_grafana, raw_server

Json = dict[str, Any]


def dashboard(uid: str, title: str = "", **more: Any) -> Json:
    variable = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid,
        "title": title or f"Rolecall {uid}",
        "schemaVersion": 39,
        "panels": [{"id": 1, "type": "stat", "targets": [{"expr": "up", "refId": "A"}]}],
        "templating": {"list": [variable, {"name": "role", "type": "query"}]},
        **more,
    }


BOTH = (dashboard("rolecall-run"), dashboard("rolecall-roles"))


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with fake_grafana() as server:
        yield server


Ask = Callable[..., Server]


@pytest.fixture
def ask() -> Iterator[Ask]:
    with contextlib.ExitStack() as opened:

        def ask(url: str, token: str = EDITOR, **options: Any) -> Server:
            server = Server(address(url), Token(token), **options)
            opened.callback(server.close)
            return server

        yield ask


@pytest.fixture
def server(grafana: FakeGrafana, ask: Ask) -> Server:
    return ask(grafana.url)


def planned(server: Server, *dashboards: Json, **options: Any) -> PushPlan:
    return plan(server, dashboards or BOTH, **{"folder": "rolecall", "datasource": "Prometheus", **options})


def pushed(server: Server, *dashboards: Json, **options: Any) -> PushResult:
    return push(server, planned(server, *dashboards, **options))


def test_the_first_push_makes_folder_and_dashboards_with_the_data_source_of_that_name(
    grafana: FakeGrafana, server: Server
) -> None:
    reported = pushed(server)
    assert reported.failed == []
    assert [line.split()[0] for line in reported.done] == ["created", "created", "created"]
    assert [f["title"] for f in grafana.folders] == ["rolecall"]
    for one in BOTH:
        kept = grafana.dashboards[one["uid"]]
        assert kept["folderUid"] == grafana.folders[0]["uid"]
        assert kept["dashboard"]["panels"] == one["panels"]
        source, other = kept["dashboard"]["templating"]["list"]
        assert source["current"] == {"text": "Prometheus", "value": "prom-1", "selected": True}
        assert "current" not in other
        assert [v["message"] for v in kept["versions"]] == [MESSAGE]


def test_a_second_push_writes_nothing_and_says_so(grafana: FakeGrafana, server: Server) -> None:
    pushed(server)
    grafana.requests.clear()
    reported = pushed(server)
    assert [line.split()[0] for line in reported.done] == ["unchanged", "unchanged"]
    assert grafana.writes == []
    assert {d["dashboard"]["version"] for d in grafana.dashboards.values()} == {1}


def test_what_changed_is_written_from_the_version_that_stands_there_and_the_rest_is_left(
    grafana: FakeGrafana, server: Server
) -> None:
    pushed(server)
    reported = pushed(server, BOTH[0], dashboard("rolecall-roles", refresh="30s"))
    assert [line.split()[0] for line in reported.done] == ["unchanged", "updated"]
    assert "(version 2)" in reported.done[1]
    assert grafana.dashboards["rolecall-run"]["dashboard"]["version"] == 1
    assert grafana.dashboards["rolecall-roles"]["dashboard"]["refresh"] == "30s"


def test_a_folder_that_is_there_is_used_and_the_top_level_needs_none(grafana: FakeGrafana, server: Server) -> None:
    grafana.folders.append({"id": 7, "uid": "theirs", "title": "rolecall"})
    pushed(server, BOTH[0])
    pushed(server, BOTH[1], folder="")
    assert len(grafana.folders) == 1
    assert [d["folderUid"] for d in grafana.dashboards.values()] == ["theirs", ""]


def test_a_dashboard_in_another_folder_is_moved_where_it_was_asked_for(grafana: FakeGrafana, server: Server) -> None:
    pushed(server, folder="")
    pushed(server)
    assert {d["folderUid"] for d in grafana.dashboards.values()} == {grafana.folders[0]["uid"]}


def test_an_edit_of_an_operator_is_reported_and_nothing_at_all_is_written(grafana: FakeGrafana, server: Server) -> None:
    pushed(server)
    grafana.people_edit("rolecall-run", title="Anna's")
    grafana.requests.clear()
    with pytest.raises(
        PushRejected, match=r"rolecall-run: anna edited it at 2026-11-22T12:00:00Z \(version 2\).*--overwrite"
    ):
        planned(server, BOTH[0], dashboard("rolecall-roles", refresh="30s"))
    assert grafana.writes == []
    assert grafana.dashboards["rolecall-run"]["dashboard"]["title"] == "Anna's"


def test_overwrite_replaces_an_edit_and_keeps_it_among_the_versions(grafana: FakeGrafana, server: Server) -> None:
    pushed(server)
    grafana.people_edit("rolecall-run", title="Anna's")
    reported = pushed(server, overwrite=True)
    assert reported.failed == []
    kept = grafana.dashboards["rolecall-run"]
    assert kept["dashboard"]["title"] == BOTH[0]["title"]
    assert [v["createdBy"] for v in kept["versions"]] == ["sa-rolecall", "anna", "sa-rolecall"]


def test_an_edit_between_looking_and_writing_is_not_lost(grafana: FakeGrafana, server: Server) -> None:
    pushed(server)
    wanted = planned(server, dashboard("rolecall-run", refresh="30s"), dashboard("rolecall-roles", refresh="30s"))
    grafana.people_edit("rolecall-run", title="Anna's")
    reported = push(server, wanted)
    (failed,) = reported.failed
    assert "rolecall-run" in failed and "anna edited it" in failed and "that version was kept" in failed
    assert grafana.dashboards["rolecall-run"]["dashboard"]["title"] == "Anna's"
    assert [line.split()[:2] for line in reported.done] == [["updated", "rolecall-roles"]]


def test_a_version_that_an_operator_restored_is_theirs(grafana: FakeGrafana, server: Server) -> None:
    pushed(server)
    grafana.people_edit("rolecall-run", refresh="1m")
    grafana.dashboards["rolecall-run"]["versions"][-1]["message"] = "Restored from version 1"
    with pytest.raises(PushRejected, match="anna edited it"):
        planned(server, dashboard("rolecall-run", refresh="5s"))


def test_what_a_server_adds_is_no_difference_but_what_an_operator_adds_to_a_list_is(
    grafana: FakeGrafana, server: Server
) -> None:
    pushed(server)
    there = grafana.dashboards["rolecall-run"]["dashboard"]
    there["panels"][0]["pluginVersion"] = "11.6.0"
    assert pushed(server).done[0].startswith("unchanged")
    there["panels"].append({"id": 2, "type": "text"})
    assert pushed(server).done[0].startswith("updated")


def test_a_data_source_that_is_not_there_or_no_prometheus_is_reported_with_what_there_is(
    grafana: FakeGrafana, server: Server
) -> None:
    with pytest.raises(
        PushRejected, match=r"no data source 'Mimir'.*'Prometheus' \(prometheus\), 'Logs / all' \(loki\)"
    ):
        planned(server, datasource="Mimir")
    with pytest.raises(PushRejected, match=r"'Logs / all' is of type 'loki'"):  # its name must survive the URL
        planned(server, datasource="Logs / all")
    assert grafana.writes == []


def test_all_problems_are_reported_at_once(grafana: FakeGrafana, server: Server) -> None:
    pushed(server)
    for one in BOTH:
        grafana.people_edit(one["uid"], title="theirs")
    grafana.dashboards["rolecall-roles"]["provisioned"] = True
    with pytest.raises(PushRejected) as reported:
        planned(server, *BOTH, dashboard("x" * 41), datasource="no such", overwrite=False)
    text = str(reported.value)
    assert len(reported.value.problems) == 4
    for part in ("'no such'", "anna edited it", "provisioned from a file", "uid of 1 to 40"):
        assert part in text


def test_a_title_that_another_dashboard_has_fails_that_one_and_says_so(grafana: FakeGrafana, server: Server) -> None:
    pushed(server, dashboard("other", title=BOTH[0]["title"]))
    reported = pushed(server)
    (failed,) = reported.failed
    assert "rolecall-run" in failed and "same name" in failed
    assert "rolecall-roles" in grafana.dashboards


def test_a_token_that_may_only_read_is_reported_and_a_wrong_one_too(grafana: FakeGrafana, ask: Ask) -> None:
    reader = ask(grafana.url, VIEWER)
    reported = pushed(reader)
    assert (
        len(reported.failed) == 1
        and "folder 'rolecall' could not be created, no dashboard was written" in reported.failed[0]
    )
    assert "role Editor" in reported.failed[0]
    unknown = ask(grafana.url, "glsa_stranger")
    with pytest.raises(GrafanaRefused, match="does not accept the token") as refused:
        planned(unknown)
    assert refused.value.status == 401


def test_the_token_is_in_the_header_and_in_no_url_text_or_repr(grafana: FakeGrafana, server: Server) -> None:
    reported = pushed(server)
    asked = [h for (method, path), h in zip(grafana.requests, grafana.headers, strict=True) if path != "/api/health"]
    assert asked and all(h["Authorization"] == f"Bearer {EDITOR}" for h in asked)
    assert not any(EDITOR in path for _, path in grafana.requests)
    assert EDITOR not in repr(Token(EDITOR)) + str(reported.done) + repr(vars(server))
    with pytest.raises(ConfigError) as wrong:
        Token(f"{EDITOR} and more")
    assert EDITOR not in str(wrong.value)


def test_a_server_that_fails_half_way_is_reported_with_what_was_written_and_what_not(
    grafana: FakeGrafana, server: Server
) -> None:
    writes = []

    def fail_second(method: str, path: str) -> None:
        if path == "/api/dashboards/db":
            writes.append(path)
            if len(writes) == 2:
                raise Refused(500, "database is locked")

    grafana.before = fail_second
    reported = pushed(server, *BOTH, dashboard("third"))
    assert [line.split()[:2] for line in reported.done[1:]] == [["created", "rolecall-run"], ["created", "third"]]
    (failed,) = reported.failed
    assert failed.startswith("failed     rolecall-roles") and "database is locked" in failed


def test_a_server_that_goes_away_half_way_leaves_no_doubt_unsaid(grafana: FakeGrafana, server: Server) -> None:
    def go_away(method: str, path: str) -> None:
        if path == "/api/dashboards/db":
            raise ConnectionAbortedError  # the connection ends without an answer

    wanted = planned(server)
    with pytest.MonkeyPatch.context():
        pass
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n") as url:
        cut = Server(address(url), Token(EDITOR), deadline_seconds=5)
        reported = push(cut, PushPlan(folder="", folder_uid="", changes=wanted.changes))
    assert "it may have been written: push again" in reported.failed[0]
    assert reported.failed[1].startswith("not tried")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


# niquests leaves the socket of a read that timed out to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("parts", "hold", "reason"),
    [
        ((), True, "did not respond within"),
        ((b"HTTP/1.1 200 OK\r\nX: ", b"y"), True, "did not respond within"),
        ((HEAD + b"\r\n[", b" "), True, "(was still sending its response after|did not respond within)"),
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), False, "is not reachable"),
        ((), False, "is not reachable"),
        ((HEAD + b"Content-Length: 5\r\n\r\n{{{{{",), False, "not JSON: is this a Grafana"),
        ((HEAD + b"Content-Length: 2\r\n\r\n[]",), False, "instead of a JSON object"),
        ((b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",), False, "returned text"),
        ((b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",), False, "redirects"),
        ((b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",), False, r"no reason given \(502\)"),
    ],
    ids=["silent", "headers-drip", "body-drip", "ssh", "closes", "garbage", "list", "html", "redirect", "gateway"],
)
def test_a_server_that_is_no_grafana_ends_in_one_sentence(
    parts: tuple[bytes, ...], hold: bool, reason: str, ask: Ask
) -> None:
    with raw_server(*parts, hold=hold) as url, pytest.raises(GrafanaRefused, match=reason) as refused:
        planned(ask(url, deadline_seconds=0.3 if hold else 10))
    text = str(refused.value)
    del refused
    gc.collect()  # here, and not in a later test
    assert EDITOR not in text and "\n" not in text


def test_an_answer_without_end_is_not_read(ask: Ask) -> None:
    block = b"[" * (1 << 20)
    with (
        raw_server(HEAD + b"\r\n", *([block] * 40)) as url,
        pytest.raises(GrafanaRefused, match="more than 32 MiB"),
    ):
        planned(ask(url))


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "host:3000",
        "http://",
        "http://anna:secret@host",
        "http://host?verify=false",
        "http://host/#x",
        "http://host:port",
        "http://ho st",
    ],
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        address(url)
    assert "secret" not in str(wrong.value)


def test_a_path_below_a_proxy_and_an_ipv6_address_are_kept(grafana: FakeGrafana, ask: Ask) -> None:
    assert str(address("https://[::1]:3000/a/b/")) == "https://[::1]:3000/a/b"
    with pytest.raises(GrafanaRefused, match="Not found"):
        planned(ask(grafana.url + "/grafana"))
    assert grafana.requests == [("GET", "/grafana/api/health")]


def test_a_certificate_is_verified_and_one_of_our_own_can_be_trusted(tmp_path: Path, ask: Ask) -> None:
    certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "node.crt", tmp_path / "node.key")
    with fake_grafana(tls) as grafana:
        with pytest.raises(GrafanaRefused, match=r"(?i)certificate"):
            planned(ask(grafana.url))
        assert grafana.requests == []
        assert pushed(ask(grafana.url, ca_file=tmp_path / "node.crt")).failed == []
    assert set(grafana.dashboards) == {d["uid"] for d in BOTH}


def test_a_token_over_http_is_in_the_clear_except_on_this_machine() -> None:
    assert address("http://grafana.example").token_in_the_clear
    assert not address("http://[::1]:3000").token_in_the_clear
    assert not address("https://grafana.example").token_in_the_clear


def test_holds_distinguishes_true_from_one_and_an_absent_key_from_a_value() -> None:
    assert holds({"a": 1, "b": 2}, {"a": 1, "c": None})
    assert not holds({"a": 1}, {"a": True})
    assert not holds({"a": True}, {"a": 1})
    assert not holds({}, {"a": 0})
    assert not holds([1, 2], [1])
