"""`rolecall users`: the token is shown once, and nowhere else."""

from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.dashboards.users import Authenticator, SignedInUser


def test_an_operator_is_added_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "users.yaml")
    assert main(["users", "add", "anna", "--file", file]) == 0
    token = capsys.readouterr().out.splitlines()[-1]
    held = Authenticator(Path(file)).sign_in(token, 1.0)
    assert isinstance(held, SignedInUser)
    assert held.name == "anna"
    assert main(["users", "list", "--file", file]) == 0
    assert capsys.readouterr().out == "anna\n"
    assert main(["users", "remove", "anna", "--file", file]) == 0
    assert main(["users", "list", "--file", file]) == 0
    assert token not in capsys.readouterr().out


def test_what_is_wrong_is_one_line_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "users.yaml"
    assert main(["users", "add", "anna", "--file", str(file)]) == 0
    before = file.read_bytes()
    capsys.readouterr()
    assert main(["users", "add", "anna", "--file", str(file)]) == 2
    assert main(["users", "remove", "bert", "--file", str(file)]) == 2
    assert main(["users", "list", "--file", str(tmp_path / "none.yaml")]) == 2
    reported = capsys.readouterr()
    assert reported.out == ""
    assert len(reported.err.splitlines()) == 3
    assert "Traceback" not in reported.err
    assert file.read_bytes() == before
