"""docs/howto/prometheus-and-grafana.md says what there is."""

import re
import shlex
import subprocess
from pathlib import Path

from rolecall.dashboards.grafana import board, export
from rolecall.dashboards.grafana.export import documents

DOC = (Path(__file__).parents[3] / "docs" / "howto" / "prometheus-and-grafana.md").read_text()


def test_every_dashboard_is_in_the_table() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `/d/([a-z-]+)` \|", DOC, re.MULTILINE)
    assert {uid: f"rolecall: {title}" for title, uid in rows} == {d["uid"]: d["title"] for d in documents()}


def test_each_row_that_it_names_is_on_that_dashboard() -> None:
    named = re.findall(r"\brow\s+\*([^*]+)\* of\s+\*([^*]+)\*", DOC)
    assert named
    for row, title in named:
        (found,) = [d for d in documents() if d["title"] == f"rolecall: {title}"]
        rows = [str(panel.get("title")) for panel in found["panels"] if panel["type"] == "row"]
        assert any(one.startswith(row) for one in rows), (row, rows)


def test_its_commands_and_files_are_there() -> None:
    from typer.main import get_command

    from rolecall.cli.grafana import app

    commands = get_command(app)
    found = re.findall(r"^rolecall grafana (\w+)(.*?)(?:#.*)?$", DOC, re.MULTILINE)
    assert {name for name, _ in found} == {"export", "push", "annotate"}
    for name, rest in found:
        known = {o for p in commands.commands[name].params for o in p.opts}  # type: ignore[attr-defined]
        assert {word for word in shlex.split(rest) if word.startswith("--")} <= known
    assert export.DASHBOARDS_PATH in DOC
    for name in export.files([], {}, export.DASHBOARDS_PATH):
        assert name.removeprefix("provisioning/") in DOC, name


def test_its_files_are_installed_on_a_fresh_machine_and_once_more(tmp_path: Path) -> None:
    (block,) = [b for b in re.findall(r"```sh\n(.*?)```", DOC, re.DOTALL) if "grafana export" in b]
    _, *copies = block.splitlines()
    here, there = tmp_path / "here", tmp_path / "there"
    made = export.files(documents()[:1], {"rolecall-x.yaml": ""}, export.DASHBOARDS_PATH)
    export.write(here / "grafana", made)
    (there / "etc/grafana/provisioning/dashboards").mkdir(parents=True)  # of Grafana's package
    script = re.sub(r"(?<=\s)/(?=var|etc)", f"{there}/", "\n".join(copies))
    for _ in range(2):
        subprocess.run(["sh", "-ec", script], cwd=here, check=True, timeout=60)
    files = {str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()}
    (board_file,) = [name for name in made if name.endswith(".json")]
    assert files == {
        f"{export.DASHBOARDS_PATH.strip('/')}/{Path(board_file).name}",
        "etc/grafana/provisioning/dashboards/rolecall.yaml",
        "etc/prometheus/rules/rolecall-x.yaml",
    }


def test_it_names_the_version_of_the_schema() -> None:
    from tests.dashboards.grafana.typescript import HOME

    assert '"@grafana/schema": "11.6.0"' in (HOME / "package.json").read_text()
    assert "`@grafana/schema` 11.6.0" in DOC
    assert all(f"/d/{uid}" in DOC for uid in (board.OVERVIEW, board.HEALTH))
