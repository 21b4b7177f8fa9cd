"""`rolecall doctor JOB`: what each role needs, whether it fits, and the exit codes of the command."""

import json
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.core.config.job import parse_job
from rolecall.node.doctor import CheckLevel, worst
from rolecall.node.job_check import examine_job
from rolecall.rl_runtime import device
from rolecall.rl_runtime.memory_estimate import FreeMemory, GpuMemory, RankNeed, needs
from rolecall.rl_runtime.memory_estimate import gib as in_gib
from rolecall.rl_runtime.tasks import check
from tests.rl_runtime.test_memory_estimate import LARGE as SIZE

GIB = 1 << 30
JOB = parse_job({"runtime": {"trainer_ranks": 2}})


def gibs(ranks: tuple[RankNeed, ...]) -> str:
    return " + ".join(in_gib(rank.host_bytes) for rank in ranks)


def test_a_job_that_fits_is_listed_with_what_it_needs() -> None:
    checks = examine_job(JOB, SIZE, FreeMemory(host_bytes=1000 * GIB))
    assert worst(checks) is CheckLevel.OK and not any(c.fix for c in checks)
    trainer, *_ = needs(JOB, SIZE)
    by_name = {c.name: c.message for c in checks}
    assert by_name["trainer"] == f"2 replicas, each needs {gibs(trainer.ranks)} GiB"
    assert by_name["memory"].endswith("GiB together; this machine has 1000.0 free")
    assert list(by_name) == ["trainer", "rollout", "standby", "reward", "controller", "node", "memory"]


def test_a_job_that_does_not_fit_is_broken_and_has_a_fix() -> None:
    checks = examine_job(JOB, SIZE, FreeMemory(host_bytes=20 * GIB))
    [broken] = [c for c in checks if c.level is CheckLevel.BROKEN]
    assert broken.name == "memory" and broken.message.startswith("roles: trainer 2 x (") and broken.fix
    assert "and 20.0 are free" in broken.message


def test_gpus_are_compared_with_each_rank() -> None:
    def checked(*gpus: int, total: int = 80) -> dict[str, tuple[CheckLevel, str]]:
        free = FreeMemory(
            host_bytes=1000 * GIB, gpus=tuple(GpuMemory(free_bytes=n * GIB, total_bytes=total * GIB) for n in gpus)
        )
        return {c.name: (c.level, c.message) for c in examine_job(JOB, SIZE, free, "cuda")}

    fits = checked(79, 74)
    trainer, *_ = needs(JOB, SIZE, "cuda")
    each = in_gib(trainer.ranks[0].device_bytes)
    assert fits["trainer"][1].endswith(f" and 2 x {each} GiB of GPUs")
    assert fits["rollout"][1].endswith(" and 72.0 GiB of GPUs"), "runtime.rollout_memory_share of each"
    assert fits["memory"] == (CheckLevel.OK, fits["memory"][1])
    assert fits["memory"][1].endswith("this machine has 1000.0 free, and its GPUs 79.0, 74.0")
    level, message = checked(8, total=8)["memory"]
    assert level is CheckLevel.BROKEN and message.startswith("runtime.trainer_ranks: each rank of a trainer needs ")


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 GiB and no GPU."""
    monkeypatch.setattr(check, "available_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(device, "found_hardware", lambda: device.Hardware(gpus=(), is_cuda_build=False))


def test_an_installation_for_gpus_is_no_device_for_a_job_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        device, "found_hardware", lambda: device.Hardware(gpus=("0",), is_cuda_build=True, engine="cuda")
    )
    (tmp_path / "job.yaml").write_text("runtime: {device: cpu}")
    assert main(["doctor", str(tmp_path / "job.yaml")]) == 1
    said = capsys.readouterr().out
    assert "broken   devices: runtime.device: cpu, but the installed vLLM computes on NVIDIA GPUs only" in said


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("runtime: {nodes: 7}", 0, "GiB together; this machine has "),
        ("runtime: {kv_cache_bytes: 100000000000000}", 1, "broken   memory: roles: trainer 2 x "),
        (
            "runtime: {rollout_ranks: 3}",
            2,
            "runtime.rollout_ranks: 3 ranks do not divide the model's 4 attention heads",
        ),
        ("model: {path: none}", 2, "config.json"),
        ("runtime: {nodes: 3}", 2, "runtime.nodes: 3, but the roles need 7"),
        ("runtime: {device: cuda}", 1, "broken   devices: runtime.device: cuda, but this machine has no NVIDIA GPU"),
    ],
)
def test_the_command_checks_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, said: str
) -> None:
    (tmp_path / "job.yaml").write_text(text)
    assert main(["doctor", str(tmp_path / "job.yaml")]) == code
    done = capsys.readouterr()
    assert said in (done.out if code < 2 else done.err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.yaml"]


@pytest.mark.usefixtures("hardware")
def test_the_command_answers_in_json_and_checks_one_thing_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text("seed: 1")
    assert main(["doctor", str(tmp_path / "job.yaml"), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["level"] == "ok" and reported["checks"][0]["name"] == "trainer"
    assert main(["doctor", str(tmp_path / "job.yaml"), "--pid", "1"]) == 2
    assert "JOB: not with --config, --pid" in capsys.readouterr().err
