"""Burn-in: correct checks pass, wrong or hanging ones fail, impossible ones are reported."""

import os
from pathlib import Path

import pytest

from rolecall.core.clock import Clock, SystemClock
from rolecall.node import burn_in as parts
from rolecall.node.burn_in import BurnInBudget, Check, CheckResult, burn_in
from rolecall.recovery.nodes import BurnIn


def fine(work: BurnInBudget, clock: Clock) -> CheckResult:
    return CheckResult(name="fine", passed=True, because=f"worked for {work.seconds:.1f} s", values={"n": 1})


def broken(work: BurnInBudget, clock: Clock) -> CheckResult:
    raise OSError("the bus is gone")


def absent(work: BurnInBudget, clock: Clock) -> CheckResult:
    return CheckResult(name="absent", passed=None, because="there is none")


def dies(work: BurnInBudget, clock: Clock) -> CheckResult:
    os._exit(7)


def hangs(work: BurnInBudget, clock: Clock) -> CheckResult:
    clock.sleep(3600)
    return fine(work, clock)


@pytest.mark.parametrize(
    ("check", "passed", "because"),
    [
        (fine, True, "worked for 0.5 s"),
        (absent, None, "there is none"),
        (broken, False, "OSError: the bus is gone"),
        (dies, False, "its process exited with code 7"),
        (hangs, False, "no result within 3 s"),
    ],
)
def test_each_check_has_its_answer(tmp_path: Path, check: Check, passed: bool | None, because: str) -> None:
    lines: list[str] = []
    grace = 2.5 if check is hangs else 60.0
    found = burn_in({"it": check}, 0.5, tmp_path, grace_seconds=grace, progress=lines.append)
    (one,) = found.checks
    assert one.passed is passed and because in one.because and lines == ["it: for 0 s"]
    assert found.passed is (passed is True)


def _result(*passed: bool | None) -> dict[str, object]:
    from rolecall.node.burn_in import BurnInResult

    checks = tuple(CheckResult(name=f"c{n}", passed=p, because="so") for n, p in enumerate(passed))
    return BurnInResult(seconds=1.0, checks=checks).to_dict()


@pytest.mark.parametrize(
    ("passed", "all_passed"),
    [((True, None), True), ((True, False), False), ((None,), False), ((), False), ((False,), False)],
)
def test_a_passed_burn_in_is_accepted_by_the_journal(passed: tuple[bool | None, ...], all_passed: bool) -> None:
    value = _result(*passed)
    assert value["passed"] is all_passed and BurnIn.from_dict(value).passed is all_passed


QUICK = BurnInBudget(seconds=0.0, folder=Path("/nonexistent"))


def test_memory_comes_back() -> None:
    found = parts.memory(QUICK, SystemClock(), num_bytes=8 << 20)
    assert found.passed is True and found.values["rounds"] == len(parts.PATTERNS) + 1


def test_a_disk_is_read_back_and_left_clean(tmp_path: Path) -> None:
    found = parts.disk(BurnInBudget(seconds=0.0, folder=tmp_path), SystemClock(), num_bytes=8 << 20)
    assert found.passed is True and found.values["rounds"] == 1 and list(tmp_path.iterdir()) == []
    gone = parts.disk(QUICK, SystemClock())
    assert gone.passed is False and "/nonexistent: No such file" in gone.because


def test_loopback_carries_it() -> None:
    found = parts.loopback(QUICK, SystemClock())
    assert found.passed is True and found.values["bytes"] == parts.BLOCK_BYTES


def test_cores_agree() -> None:
    before = os.sched_getaffinity(0)
    try:
        found = parts.cpu_math(QUICK, SystemClock())
    finally:
        os.sched_setaffinity(0, before)
    assert found.passed is True and found.values["cores"] == len(before) == found.values["rounds"]


def test_a_core_that_is_wrong_is_named() -> None:
    answers = iter(["a", "a", "b", *"a" * 100])
    before = os.sched_getaffinity(0)
    try:
        found = parts.cpu_math(BurnInBudget(seconds=0.1, folder=Path()), SystemClock(), (lambda: next(answers), "sums"))
    finally:
        os.sched_setaffinity(0, before)
    assert found.passed is False and "result differs from core" in found.because


def test_arithmetic_without_numpy_has_one_answer() -> None:
    assert parts._scalar() == parts._scalar()


def test_products_on_a_device_are_compared_bit_by_bit() -> None:
    torch = pytest.importorskip("torch")
    values = parts.products(torch, ["cpu"], 0.0, SystemClock(), size=32)
    assert values.wrong == "" and values.rounds == 1 and len(values.digests["cpu"]) == 16
    assert values == parts.products(torch, ["cpu"], 0.0, SystemClock(), size=32)


def test_a_node_without_a_gpu_is_reported() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    found = parts.gpu_math(QUICK, SystemClock())
    assert found.passed is None and found.because == "torch sees no GPU: none was tested"
