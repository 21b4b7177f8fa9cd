"""The commands of people, as an operator types them: what they print, what they write, and what they refuse."""

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rolecall.cli.main import main
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.rundir import RunDir
from rolecall.node import burn_in
from rolecall.node.burn_in import BurnInResult, CheckResult
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.loop import Watch
from rolecall.recovery.operators import commands
from tests.recovery.world import World

K = EventKind


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A run whose journal runs on a fake clock beside real commands."""
    path = tmp_path / "runs" / "r1"
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return World(path, mode="approve", approval_timeout_seconds=600.0)


def run_command(world: World, *argv: str) -> int:
    runs = str(Path(world.url.removeprefix("sqlite:///")).parent.parent)
    return main([*argv, "--run", "r1", "--runs", runs])


def proposal(world: World) -> tuple[Watch, str]:
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(lambda: world.events(K.PLAN_PROPOSED), watch)
    attempt = world.only().attempt
    assert attempt is not None
    return watch, attempt.plan.digest


def test_hold_and_lift(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    _, digest = proposal(world)
    assert run_command(world, "hold", digest, "--reason", "a look", "--minutes", "5") == 0
    assert "on hold until" in capsys.readouterr().out
    attempt = world.only().attempt
    assert attempt is not None and attempt.hold is not None and "@" in attempt.hold.by
    assert run_command(world, "lift", digest, "--reason", "seen") == 0
    assert run_command(world, "lift", digest) == 2
    assert f"plan {digest} is not on hold" in capsys.readouterr().err
    assert run_command(world, "hold", digest, "--reason", "a look", "--minutes", "1e9") == 2


def test_review(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    proposal(world)
    assert run_command(world, "review", "inc-1-rollout-1") == 2
    assert run_command(world, "review", "inc-1-rollout-1", "--right", "--wrong") == 2
    assert "--right or --wrong" in capsys.readouterr().err
    assert run_command(world, "review", "inc-1-rollout-1", "--wrong", "--reason", "a drill") == 0
    review = world.only().review
    assert review is not None and review.right is False and review.because == "a drill"
    assert run_command(world, "review", "inc-1-rollout-1", "--right") == 0
    capsys.readouterr()
    assert run_command(world, "incidents", "inc-1-rollout-1") == 1
    assert [line.split("UTC  ")[1] for line in capsys.readouterr().out.splitlines() if "UTC  diagnosis" in line] == [
        "diagnosis reviewed: wrong: a drill",
        "diagnosis reviewed: right",
    ]


def test_a_node_from_drain_to_return(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    watch = world.watch()
    world.step(watch)
    assert run_command(world, "node", "drain", "node-4", "--reason", "a fan \x1b[2J") == 0
    assert "to be moved once all guards allow it: rollout/1 (inc-1-rollout-1)" in capsys.readouterr().out
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED, "an operator's request is no proposal, in mode approve too"
    assert run_command(world, "node", "list") == 0
    reported = capsys.readouterr().out
    assert "QUARANTINED since" in reported and "\x1b" not in reported and "inc-1-rollout-1" in reported
    assert run_command(world, "node", "list", "--json") == 0
    rows = {row["node"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["node-4"]["replicas"] == [] and rows["node-4"]["quarantined_since"] is not None
    assert run_command(world, "node", "return", "node-4", "--reason", "a new fan") == 0
    assert run_command(world, "node", "quarantine", "node-4", "--reason", "it is loud again") == 0
    assert run_command(world, "node", "quarantine", "node-9", "--reason", "who?") == 2
    assert "node-9 is not a node of this run" in capsys.readouterr().err
    assert world.only().state is IncidentState.CLOSED


def test_a_burn_in_is_recorded(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(world, "node", "burn-in", "node-4", "--seconds", "1", "--json") == 0
    reported: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert reported["passed"] is True and reported["node"] == "node-4"
    checks = {c["name"]: c for c in reported["checks"]}
    assert set(checks) == {"gpu_math", "cpu_math", "memory", "disk", "loopback"}
    run = RunDir(Path(world.url.removeprefix("sqlite:///")).parent)
    row = {r["node"]: r for r in commands.nodes(run)}["node-4"]
    assert [c["name"] for c in row["burn_ins"][0]["result"]["checks"]] == list(checks)
    assert run_command(world, "node", "list") == 0
    assert "passed, 1 recorded" in capsys.readouterr().out


def test_a_burn_in_that_is_recorded_needs_a_name(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(world, "node", "burn-in") == 2
    assert "NODE: needed with --run" in capsys.readouterr().err
    assert main(["node", "burn-in", "--folder", "/nonexistent"]) == 2


def test_a_burn_in_that_cannot_be_recorded_does_not_begin(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burn_in, "burn_in", no_work)
    assert run_command(world, "node", "burn-in", "Node 4") == 2
    assert "'Node 4' is not" in capsys.readouterr().err
    Path(world.url.removeprefix("sqlite:///")).unlink()
    assert run_command(world, "node", "burn-in", "node-4") == 2
    assert "there is no journal" in capsys.readouterr().err


def no_work(*_: object, **__: object) -> NoReturn:
    raise AssertionError("the machine was tested")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_result_of_a_burn_in_is_shown_although_it_cannot_be_recorded(
    world: World, form: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tested(*_: object, **__: object) -> BurnInResult:
        Path(world.url.removeprefix("sqlite:///")).unlink()
        return BurnInResult(seconds=5.0, checks=(CheckResult(name="disk", passed=False, because="slow"),))

    monkeypatch.setattr(burn_in, "burn_in", tested)
    assert run_command(world, "node", "burn-in", "node-4", *form) == 2
    reported = capsys.readouterr()
    assert "slow" in reported.out and "recorded" not in reported.out
    assert "there is no journal" in reported.err


def test_approval_is_an_option_of_watch_run_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "agents", "http://127.0.0.1:1", "--require-approval"]) == 2
    assert "No such option: --require-approval" in capsys.readouterr().err
