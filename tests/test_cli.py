"""The command line: bad input is one clear message, the right exit code, and nothing started."""

from pathlib import Path

import pytest

from rolecall.cli import main


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_wrong_job_file_tells_every_problem_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("seed: -1\nfoo: 1\nroles: {trainer: 0}\n")
    code, out, err = _run(capsys, "run", str(job), "--runs", str(tmp_path / "runs"))
    assert code == 2 and out == ""
    assert "3 problem(s)" in err
    assert all(path in err for path in ("seed: ", "roles.trainer: ", "foo: unknown key"))
    assert not (tmp_path / "runs").exists()


def test_too_few_nodes_says_who_lacks_what_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("runtime: {nodes: 3}\n")
    code, _, err = _run(capsys, "run", str(job), "--runs", str(tmp_path / "runs"))
    assert code == 2
    assert "rollout lacks 3 of 3" in err and "standby lacks 1 of 1" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("run", "nowhere.yaml"), "nowhere.yaml"),
        (("demo", "--faults", "nope"), "nope: unknown"),
        (("demo", "--set", "detector.nope=1"), "detector.nope: unknown key"),
        (("demo", "--id", "Bad Id"), "Bad Id"),
        (("status", "nothing-here"), "nothing-here"),
        (("audit", "nothing-here"), "nothing-here"),
        (("down", "nothing-here"), "nothing-here"),
        (("inject", "nothing-here", "--kind", "rollout-kill"), "nothing-here"),
        (("inject", "nothing-here", "--kind", "nope"), "rollout-kill, trainer-hang"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_usage_errors_are_one_message_and_exit_code_2(
    argv: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = _run(capsys, *argv)
    assert code == 2
    assert said in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
