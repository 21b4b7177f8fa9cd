"""`rolecall grafana export`: what is written, and what is never overwritten."""

import json
import os
from pathlib import Path

import pytest
import yaml

from rolecall.cli.main import main
from rolecall.dashboards.grafana import export
from rolecall.dashboards.grafana.export import documents


def _all_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_every_dashboard_is_written_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grafana", "export", "--out", str(tmp_path / "a" / "b")]) == 0
    reported = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {p.relative_to(tmp_path / "a" / "b") for p in reported} == {
        Path(n) for n in _all_files(tmp_path / "a" / "b")
    }
    for document in documents():
        path = tmp_path / "a" / "b" / "dashboards" / f"{document['uid']}.json"
        assert json.loads(path.read_text()) == document


def test_the_same_bytes_again(tmp_path: Path) -> None:
    assert main(["grafana", "export", "--out", str(tmp_path)]) == 0
    first = _all_files(tmp_path)
    assert main(["grafana", "export", "--out", str(tmp_path)]) == 0
    assert _all_files(tmp_path) == first


def test_provisioning_is_what_grafana_reads(tmp_path: Path) -> None:
    path = '/srv/a "quoted" path: #x'
    assert main(["grafana", "export", "--out", str(tmp_path), "--dashboards-path", path]) == 0
    provider = yaml.safe_load((tmp_path / "provisioning" / "dashboards" / "rolecall.yaml").read_text())
    assert provider["apiVersion"] == 1
    assert provider["providers"][0]["options"] == {"path": path}
    source = yaml.safe_load((tmp_path / "provisioning" / "datasources" / "prometheus.yaml.example").read_text())
    assert source["datasources"][0]["type"] == "prometheus"


def test_no_foreign_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grafana", "export", "--out", str(tmp_path)]) == 0
    overview = tmp_path / "dashboards" / "rolecall-gpus.json"
    provider = tmp_path / "provisioning" / "dashboards" / "rolecall.yaml"
    overview.write_text('{"uid": "rolecall-gpus", "tags": ["mine"]}')
    provider.write_text("apiVersion: 1\n")
    (tmp_path / "provisioning" / "datasources" / "prometheus.yaml.example").unlink()
    before = _all_files(tmp_path)
    assert main(["grafana", "export", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{overview}: is not a dashboard of rolecall" in said
    assert f"{provider}: was not written by rolecall" in said
    assert _all_files(tmp_path) == before, "nothing is written when anything stands in the way"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"uid": "rolecall-gpus", "tags": null}', "\0\xff"])
def test_whatever_is_no_dashboard_of_ours_stays(tmp_path: Path, text: str) -> None:
    made = export.files(documents(), {}, "/x")
    path = tmp_path / "dashboards" / "rolecall-gpus.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(Exception, match="is not a dashboard of rolecall"):
        export.write(tmp_path, made)
    assert path.read_text() == text


def test_links_and_folders_are_not_followed(tmp_path: Path) -> None:
    made = export.files(documents(), {}, "/x")
    (tmp_path / "dashboards" / "rolecall-gpus.json").mkdir(parents=True)
    (tmp_path / "provisioning" / "dashboards").mkdir(parents=True)
    os.symlink("/dev/null", tmp_path / "provisioning" / "dashboards" / "rolecall.yaml")
    with pytest.raises(Exception, match=r"2 problem|is not a regular file"):
        export.write(tmp_path, made)


def test_rules_stand_beside_the_dashboards() -> None:
    made = export.files([], {"some.yaml": "groups: []\n"}, "/x")
    assert made["rules/some.yaml"].startswith(export.MARK)
    assert yaml.safe_load(made["rules/some.yaml"]) == {"groups": []}


def test_a_wrong_address_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grafana", "export", "--out", str(tmp_path / "x"), "--incidents-at", "nowhere"]) == 2
    assert "--incidents-at: expected http[s]://" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_alerts_link_their_runbooks_by_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["grafana", "export", "--out", str(tmp_path)]
    assert main(options) == 0
    alerts = tmp_path / "rules" / "rolecall-alerts.yaml"
    assert "runbook_url" not in alerts.read_text() and "--runbooks URL" in capsys.readouterr().err
    assert main([*options, "--runbooks", "https://docs.example/runbooks"]) == 0
    assert "runbook_url: https://docs.example/runbooks/RolecallWatchDown.md" in alerts.read_text()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "url",
    [
        "docs/runbooks",
        "//wiki/x",
        "ftp://x",
        "https://",
        "http://[::1",
        "https://u:p@x",
        "https://x/{name}",
        "https://x y",
        "https://x:port/y",
        "https://x:99999/y",
        "https://x/{alert}?y",
    ],
)
def test_a_runbook_url_that_is_not_absolute_is_refused(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grafana", "export", "--out", str(tmp_path / "x"), "--runbooks", url]) == 2
    why = "a link that everyone can see" if "@" in url else f"expected http[s]://HOST[:PORT][/PATH], got {url!r}"
    assert f"--runbooks: {why}" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
