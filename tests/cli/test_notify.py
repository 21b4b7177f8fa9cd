"""`rolecall notify test` against services on loopback: what is sent, what is said, and the exit code."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.recovery.notifications import delivery
from rolecall.recovery.notifications.target import SECRET_ENV
from tests.recovery.notifications.service import Service, serving


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Service]:
    monkeypatch.delenv(SECRET_ENV, raising=False)
    caplog.set_level(logging.INFO)
    with serving() as service:
        yield service


@pytest.mark.parametrize(
    ("form", "path", "messages"),
    [("webhook", "/s3cret", 2), ("slack", "/s3cret", 1), ("pagerduty", "/v2/enqueue", 2), ("opsgenie", "/v2/alerts", 2),
     ("alertmanager", "/api/v2/alerts", 2)],
)  # fmt: skip
def test_a_test_message_and_its_resolution(
    service: Service, form: str, path: str, messages: int, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv(SECRET_ENV, "s3cret-key")
    service.answers = [(202, "got s3cret-key")] * messages
    assert main(["notify", "test", "--format", form, "--url", f"{service.url}{path}"]) == 0
    said = capsys.readouterr()
    assert "s3cret" not in said.out + said.err + caplog.text
    assert said.out.splitlines()[0] == f"{form}: {service.url}{'/***' if 's3cret' in path else path}"
    assert said.out.count("accepted, 202 got ***") == len(service.got) == messages
    assert all(got.method == "POST" and got.headers["content-type"] == "application/json" for got in service.got)
    assert "test message of rolecall" in json.dumps(service.got[0].body)
    ends = {"webhook": "/s3cret", "pagerduty": "/v2/enqueue", "alertmanager": "/api/v2/alerts"}
    if form == "opsgenie":
        assert service.got[1].path.endswith("/close?identifierType=alias")
        assert service.got[0].headers["authorization"] == "GenieKey s3cret-key"
    elif form in ends:
        assert service.got[1].path == ends[form]
    if form == "pagerduty":
        assert [got.body["event_action"] for got in service.got] == ["trigger", "resolve"]
        assert service.got[0].body["dedup_key"] == service.got[1].body["dedup_key"]


@pytest.mark.parametrize("status", [302, 403, 500])
def test_a_refusal_is_exit_code_1_and_is_tried_once(
    service: Service, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers = [(status, "invalid_payload")]
    assert main(["notify", "test", "--url", f"{service.url}/hook", "--json"]) == 1
    (message,) = json.loads(capsys.readouterr().out)["messages"]
    assert message == {"what": "test message", "accepted": False, "answer": f"{status} invalid_payload"}
    assert len(service.got) == 1


def test_no_answer_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery.send_test, "__kwdefaults__", {"clock": None, "try_seconds": 0.2})
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/s3cret"
        assert main(["notify", "test", "--url", url]) == 1
    assert main(["notify", "test", "--url", url]) == 1
    said = capsys.readouterr().out
    assert "no whole answer within 0.2 s" in said and "connection refused" in said and "s3cret" not in said


def test_the_channel_of_a_job_file_and_of_a_run(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, run = tmp_path / "job.yaml", tmp_path / "runs" / "my-run"
    job.write_text(f"name: parity\nrecovery: {{webhook_url: '{service.url}/hook'}}\n")
    assert main(["notify", "test", "--job", str(job)]) == 0
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"config": {"recovery": {"notify": {"url": f"{service.url}/hook"}}}}))
    assert main(["notify", "test", "my-run", "--runs", str(tmp_path / "runs")]) == 0
    assert [got.body["run"] for got in service.got] == ["parity", "parity", "my-run", "my-run"]
    assert [got.body["resolved"] for got in service.got] == [False, True, False, True]
    capsys.readouterr()


def test_the_channel_of_a_watch_file(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = tmp_path / "watch.yaml"
    watch.write_text(
        f"recovery: {{mode: act, notify: {{url: '{service.url}/hook'}}}}\n"
        "roles: [rollout]\nactuator: {kind: command, replace: ['true']}\n"
    )
    assert main(["notify", "test", "--config", str(watch)]) == 0
    assert [got.body["resolved"] for got in service.got] == [False, True]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--url", "s3cret"], "must be http"),
        (["--format", "pagerduty"], "needs its routing"),
        (["--job", "job.yaml", "--url", "http://a"], "only one of them"),
        (["--job", "job.yaml", "--config", "watch.yaml"], "only one of them"),
        (["--job", "job.yaml"], "no notification channel is configured"),
        (["nowhere"], "nowhere"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_ENV, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: parity\n")
    assert main(["notify", "test", *argv]) == 2
    error = capsys.readouterr().err
    assert said in error and "s3cret" not in error
