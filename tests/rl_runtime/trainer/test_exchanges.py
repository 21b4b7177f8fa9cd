"""What a rank waits for the others of its replica is counted apart from its own work.

pytest tests/rl_runtime/trainer/test_exchanges.py
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.agent.processes.state_pages import PageReader
from rolecall.rl_runtime import exchanges
from rolecall.rl_runtime.exchanges import exchange, run_delay_seconds, waited_seconds
from tests.rl_runtime.trainer.test_tensor_ranks import small_job
from tests.rl_runtime.trainer_process import RankedReplica, Team
from tests.support import eventually


@pytest.fixture
def team() -> Iterator[Team]:
    team = Team(small_job("grpo", {}))
    yield team
    team.close()


@pytest.mark.parametrize("tensor", [1, 2], ids=["shards", "tensor"])
def test_the_others_wait_for_a_slow_rank(team: Team, tensor: int, tmp_path: Path) -> None:
    member = RankedReplica(team, 0, 2, tensor=tensor, node_dir=str(tmp_path), stops={"backward": 1})
    member.ready()
    team.join([member])
    readers = {r.read().rank: r for r in map(PageReader, tmp_path.glob("pages/*.page"))}
    member.ranks[0].stop_at("backward", 1)
    team.tell_step(0, {member: [0, 1, 2, 3]})
    for rank in member.ranks:
        rank.arrives_at("backward")
    before = readers[0].read()
    member.ranks[0].go_on()
    eventually(lambda: readers[0].read().exchanges > before.exchanges, "the first rank waits for the other")
    beats = readers[0].read().beats
    eventually(lambda: readers[0].read().beats > beats + 1, "it has waited for a moment")
    began = time.monotonic()
    eventually(lambda: readers[0].read().beats > beats + 6, "it has waited for longer than it works")
    held = time.monotonic() - began
    member.ranks[1].go_on()
    num_tokens = member.answer().num_tokens
    fast, slow = readers[0].read(), readers[1].read()
    assert fast.exchange_seconds >= held and slow.busy_seconds >= held
    assert fast.busy_seconds < slow.busy_seconds and slow.exchange_seconds < fast.exchange_seconds
    assert fast.work_units == slow.work_units == 4
    assert fast.tokens + slow.tokens == num_tokens and abs(fast.tokens - slow.tokens) <= 4, "one load for all ranks"


def test_time_without_a_cpu_is_no_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "monotonic", iter([10.0, 12.0, 20.0, 21.0]).__next__)
    monkeypatch.setattr(exchanges, "run_delay_seconds", iter([1.0, 1.5, 2.0, 3.5]).__next__)
    before = waited_seconds()
    with exchange():
        pass
    assert waited_seconds() - before == pytest.approx(1.5)
    with pytest.raises(RuntimeError), exchange():
        raise RuntimeError("a rank was lost")
    assert waited_seconds() - before == pytest.approx(1.5), "never less than nothing"


@pytest.mark.parametrize(("text", "seconds"), [(b"900 2500000000 7\n", 2.5), (b"", 0.0), (b"a b c", 0.0), (None, 0.0)])
def test_the_run_delay_of_a_thread(text: bytes | None, seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "schedstat"
    if text is not None:
        path.write_bytes(text)
    assert run_delay_seconds(str(path)) == seconds
