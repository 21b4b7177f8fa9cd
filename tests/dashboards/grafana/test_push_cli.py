"""`rolecall grafana push` and `annotate`, as typed: tokens, exit codes and what is reported."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.cli.grafana import TOKEN_ENV, read_token
from rolecall.cli.main import main
from rolecall.cli.options import JOURNAL_ENV
from rolecall.core.errors import ConfigError
from rolecall.core.rundir import RunDir
from rolecall.dashboards.grafana.export import documents
from tests.dashboards.grafana.fake_grafana import EDITOR, VIEWER, FakeGrafana, fake_grafana


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with fake_grafana() as server:
        yield server


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(EDITOR + "\n")
    return str(path)


def test_all_dashboards_are_put_there_once(
    grafana: FakeGrafana, token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["grafana", "push", "--url", grafana.url, "--token-file", token_file, "--datasource", "Prometheus"]
    assert main([*argv, "--dry-run"]) == 0
    assert grafana.writes == [] and "would be created" in capsys.readouterr().out
    assert main(argv) == 0
    reported = capsys.readouterr()
    assert "alert rules are not pushed" in reported.out and "created    folder 'rolecall'" in reported.out
    assert set(grafana.dashboards) == {d["uid"] for d in documents()}
    for kept in grafana.dashboards.values():
        first = kept["dashboard"]["templating"]["list"][0]
        assert first["current"]["value"] == "prom-1"
    grafana.requests.clear()
    assert main([*argv, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and len(said["done"]) == len(documents())
    assert all(line.startswith("unchanged") for line in said["done"])
    assert grafana.writes == []
    assert EDITOR not in reported.out + reported.err


def test_a_conflict_is_exit_code_1_and_a_wrong_use_2(
    grafana: FakeGrafana, token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["grafana", "push", "--url", grafana.url, "--token-file", token_file]
    assert main(argv) == 0
    uid = documents()[0]["uid"]
    grafana.people_edit(uid, title="Anna's")
    assert main(argv) == 1
    assert "anna edited it" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 0
    assert main([*argv, "--datasource", "none"]) == 1
    assert "available: 'Prometheus' (prometheus)" in capsys.readouterr().err
    assert main(["grafana", "push", "--url", "http://u:p@h", "--token-file", token_file]) == 2
    assert main(["grafana", "push", "--url", grafana.url]) == 2
    assert main([*argv, "--ca-file", "/nowhere"]) == 2
    assert TOKEN_ENV in capsys.readouterr().err
    assert main(["grafana", "push", "--url", "http://127.0.0.1:1", "--token-file", token_file]) == 1
    assert "Connection refused" in capsys.readouterr().err


def test_a_token_that_may_only_read_is_exit_code_1(grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, VIEWER)
    assert main(["grafana", "push", "--url", grafana.url]) == 1
    assert not grafana.dashboards


def test_incidents_of_a_run_are_annotated_once(
    grafana: FakeGrafana, token_file: str, fake_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["grafana", "annotate", "--url", grafana.url, "--token-file", token_file, str(fake_run.path)]
    assert main(argv) == 0
    kept = list(grafana.annotations.values())
    assert {tag for a in kept for tag in a["tags"] if tag.startswith("fault:")} == {
        "fault:crash",
        "fault:hang",
        "fault:slow",
    }
    assert {f"run:{fake_run.run_id}", "rolecall"} <= set(kept[0]["tags"])
    assert all(a["timeEnd"] > a["time"] and a["text"].endswith("(resolved)") for a in kept)
    capsys.readouterr()
    grafana.requests.clear()
    assert main(argv) == 0
    assert capsys.readouterr().out.count("unchanged") == 3 and grafana.writes == []


def test_the_url_of_a_journal_is_enough(
    grafana: FakeGrafana,
    token_file: str,
    fake_run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["grafana", "annotate", "--url", grafana.url, "--token-file", token_file]
    assert main([*argv, "--journal", fake_run.database_url]) == 0
    assert len(grafana.annotations) == 3
    assert all(f"run:{fake_run.run_id}" in a["tags"] for a in grafana.annotations.values())
    grafana.requests.clear()
    monkeypatch.setenv(JOURNAL_ENV, fake_run.database_url)
    assert main([*argv, "--journal", "-"]) == 0
    assert grafana.writes == [], "the same run, found again"
    assert main([*argv, str(fake_run.path), "--journal", fake_run.database_url]) == 2
    assert main([*argv, "--journal", "mysql://u:hush@h/d"]) == 2
    reported = capsys.readouterr().err
    assert "give one of the two" in reported and "is not supported" in reported and "hush" not in reported


def test_a_token_comes_from_one_place_and_is_in_no_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_text(f"{EDITOR}\n")
    nothing = io.StringIO()
    assert read_token("", path, {TOKEN_ENV: "other"}, nothing).revealed() == EDITOR
    assert read_token("-", None, {}, io.StringIO(f"{EDITOR}\nmore")).revealed() == EDITOR
    assert read_token("", None, {TOKEN_ENV: EDITOR}, nothing).revealed() == EDITOR
    assert capsys.readouterr().err == ""
    assert read_token(EDITOR, None, {}, nothing).revealed() == EDITOR
    warned = capsys.readouterr().err
    assert "visible to all users" in warned and EDITOR not in warned
    path.write_text(f"{EDITOR} {EDITOR}")
    for literal, file, reason in (
        ("x", path, "one of the two"),
        ("", path, "without spaces"),
        ("", tmp_path, "directory"),
        ("", tmp_path / "none", "No such file"),
        ("", None, "no token"),
    ):
        with pytest.raises(ConfigError, match=reason) as wrong:
            read_token(literal, file, {}, nothing)
        assert EDITOR not in str(wrong.value)


def test_an_address_beyond_this_machine_without_tls_is_warned_of(
    token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grafana", "push", "--url", "http://grafana.invalid", "--token-file", token_file]) == 1
    reported = capsys.readouterr().err
    assert "the token is sent unencrypted" in reported and "is not reachable" in reported
