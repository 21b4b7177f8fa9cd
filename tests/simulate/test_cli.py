"""`rolecall simulate run` and `rolecall doctor JOB --plan`: what they print, and the mistakes that they name."""

import json
from pathlib import Path

import pytest

from rolecall.cli.main import main

QUICK = ("--days", "2", "--seeds", "2")


def answered(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_run_prints_ettr_and_lost_hours_of_each_arm(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answered(capsys, "simulate", "run", "--gpus", "1024", *QUICK)
    assert code == 0 and "1,024 GPUs, async" in out
    for arm in ("replica", "role", "restart_warm", "restart_cold"):
        assert len([line for line in out.splitlines() if line.startswith(arm + " ")]) == 1 and out.count(arm) == 2
    assert "GPU-hours lost" in out and "95 %" in out and "ETTR, %" in out and "recompute" in out


def test_run_prints_json_that_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answered(capsys, "simulate", "run", "--arm", "role", "--costs", "--json", *QUICK)
    found = json.loads(out)
    arm = found["arms"]["role"]
    assert code == 0 and list(found["arms"]) == ["role"] == list(found["costs"])
    assert arm["useful_gpu_hours"] + sum(arm["lost_gpu_hours"].values()) == pytest.approx(arm["gpu_hours"])
    assert set(arm["ettr"]) == {"n", "median", "low", "high"} and arm["ettr"]["n"] == 2
    cost = found["costs"]["role"]["eviction"]["gpu_hours_per_alarm"]
    assert cost["low"] <= cost["value"] <= cost["high"] and cost["value"] > 0


def test_costs_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answered(capsys, "simulate", "run", "--arm", "restart_warm", "--costs", *QUICK)
    assert "a second of detection costs" in out and "false alarms per 1,000 machine-days" in out
    assert "standby machines 0 for trainers, 0 for rollouts" in out and "the interval of 95 % in which it lies" in out


def test_the_same_seed_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (answered(capsys, "simulate", "run", "--seed", n, *QUICK)[1] for n in ("1", "1", "3"))
    assert first == again != other


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--mode", "asink"), "--mode: 'asink' is not one of async, semi_sync, sync"),
        (("--arm", "magic"), "--arm: 'magic' is not one of replica, role, restart_warm, restart_cold"),
        (("--gpus", "10"), "--gpus: 10 are too few"),
        (("--gpus", "10000000"), "Invalid value for '--gpus': Input should be less than or equal to 1000000"),
        (("nowhere.yaml",), "nowhere.yaml: No such file or directory"),
    ],
)
def test_a_mistake_is_one_message(argv: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answered(capsys, "simulate", "run", *argv)
    assert (code, out) == (2, "") and problem in err


def test_too_many_faults_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where an option, not the file, makes them too many."""
    path = tmp_path / "fleet.yaml"
    path.write_text("faults: {trainer_per_gpu_hour: 0.01}\n")
    assert answered(capsys, "simulate", "run", str(path), "--days", "0.1", "--seeds", "1")[0] == 0
    code, out, err = answered(capsys, "simulate", "run", str(path), "--days", "3000")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and "1,000,000 can be simulated" in err


def test_settings_are_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("mode: sync\ntrainer: {replicas: 16}\nrollout: {replicas: 0}\ndays: 1\n")
    code, out, _ = answered(capsys, "simulate", "run", str(path), "--seeds", "1")
    assert code == 0 and "128 GPUs, sync: 16 trainers of 8 GPUs" in out


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(
        "roles: {trainer: 2, rollout: 16}\nmodel: {num_heads: 8, num_kv_heads: 8}\nruntime: {trainer_ranks: 64, rollout_ranks: 8}\n"
    )
    return str(path)


def test_doctor_plans_a_job(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "fleet.yaml"
    settings.write_text("days: 2\n")
    plan = ("doctor", job, "--plan", "--gpus", "1024", "--step-seconds", "60", "--settings", str(settings))
    code, out, _ = answered(capsys, *plan)
    assert code == 0 and "1,024 GPUs, async: 8 trainers of 64 GPUs, 64 rollouts of 8 GPUs" in out
    assert "steps of 60.0 s" in out and "standby machines: " in out and "by Young" in out
    assert "replica: the replica at fault alone is replaced, as rolecall does" in out
    found = json.loads(answered(capsys, *plan, "--json")[1])
    assert found["gpus"] == 1024 and set(found["standbys"]) == {"trainer", "rollout"}


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--plan",), "JOB: needed with --plan"),
        (("--gpus", "64"), "--gpus, --step-seconds, --settings: only with --plan"),
        (("JOB", "--plan", "--nhc"), "--plan: not with --config, --pid, --agents, --credentials or --nhc"),
        (("JOB", "--plan", "--gpus", "10"), "--gpus: 10 are too few: one replica of each role needs 72"),
    ],
)
def test_a_plan_without_what_it_needs_is_refused(argv: tuple[str, ...], problem: str, job: str, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    code, _, err = answered(capsys, "doctor", *(job if a == "JOB" else a for a in argv))
    assert code == 2 and problem in err
