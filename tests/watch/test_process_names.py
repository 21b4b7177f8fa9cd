"""Two agents that give one name to two processes: the watch tells them apart, and says so."""

from dataclasses import replace

import pytest

from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.watch.agents import HELD_SECONDS, UniqueReplicaSource


def sample(node: str, replica: str = "rollout/32", rank: int = 0, **fields: object) -> ProcessSample:
    process = ProcessId(node=NodeId(node), pid=7, start_ticks=1)
    made = ProcessSample(
        process=process,
        role=replica.partition("/")[0],
        replica=replica,
        rank=rank,
        incarnation=0,
        at=1.0,
        wall_at=1.0,
        alive=True,
        page_ok=False,
        phase="",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def exited(of: ProcessSample) -> AgentEvent:
    return AgentEvent(
        seq=1,
        kind=AgentEventKind.EXITED,
        node=of.process.node,
        at=1.0,
        wall_at=1.0,
        process=of.process,
        role=of.role,
        replica=of.replica,
        rank=of.rank,
        incarnation=of.incarnation,
    )


class Heard:
    """A source of what is put into it."""

    def __init__(self) -> None:
        self.next = Observation(wall_at=0.0)
        self.ending = set[ProcessId]()
        self.places = UniqueReplicaSource(self, lambda: self.ending)

    def poll(self, timeout_seconds: float) -> Observation:
        return self.next

    def hear(self, wall_at: float, *samples: ProcessSample, events: tuple[AgentEvent, ...] = ()) -> Observation:
        batches = tuple(
            SampleBatch(
                node=s.process.node, agent_pid=1, cursor=1, lost=0, at=1.0, wall_at=wall_at, processes=(s,), hosts=()
            )
            for s in samples
        )
        self.next = Observation(wall_at=wall_at, batches=batches, events=events)
        return self.places.poll(0.0)

    def names(self, wall_at: float, *samples: ProcessSample) -> list[str]:
        return [p.replica for b in self.hear(wall_at, *samples).batches for p in b.processes]


def test_the_second_node_gets_a_name_of_its_own_for_samples_and_events(caplog: pytest.LogCaptureFixture) -> None:
    heard, first, second = Heard(), sample("a-1"), sample("b-1")
    assert heard.names(0.0, first) == ["rollout/32"]
    kept, other = heard.names(1.0, first, second)
    assert kept == "rollout/32" and other != kept and other.startswith("rollout/")
    seen = heard.hear(2.0, second, events=(exited(second), exited(first)))
    assert [e.replica for e in seen.events] == [other, kept]
    assert [p.replica for b in seen.batches for p in b.processes] == [other]
    assert len(caplog.records) == 1
    assert f"rollout/32 rank 0 is alive on a-1 and on b-1: the one on b-1 is renamed to {other}" in caplog.text
    # For good: its past goes with the name, whatever becomes of the first.
    assert heard.names(1000.0, second) == [other]


def test_ranks_of_one_replica_on_two_nodes_are_one_job(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    ranks = [sample("a-1", "trainer/0", 0), sample("b-1", "trainer/0", 1)]
    assert heard.names(0.0, *ranks) == heard.names(1.0, *ranks) == ["trainer/0"] * 2
    # A third claims a place: all that its node calls so is meant.
    other = heard.names(2.0, *ranks, sample("c-1", "trainer/0", 1))[2]
    assert heard.names(3.0, sample("c-1", "trainer/0", 5)) == [other] != ["trainer/0"]
    assert len(caplog.records) == 1


def test_a_job_that_moved_keeps_its_name(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    heard.hear(0.0, sample("a-1"))
    heard.hear(5.0, sample("a-1", alive=False))
    assert heard.names(0.0 + HELD_SECONDS + 0.1, sample("b-1")) == ["rollout/32"]
    assert not caplog.records


@pytest.mark.parametrize("seen_in", ["event", "sample"])
def test_a_rank_that_moves_at_once_keeps_its_name_if_its_old_process_was_seen_to_end(
    seen_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard, old, moved = Heard(), sample("a-1"), sample("b-1")
    heard.hear(0.0, old)
    if seen_in == "event":
        seen = heard.hear(1.0, old, moved, events=(exited(old),))  # with a sample from before its end
    else:
        seen = heard.hear(1.0, old, moved, replace(old, alive=False))
    assert {p.replica for b in seen.batches for p in b.processes} == {"rollout/32"}
    assert heard.names(2.0, moved) == ["rollout/32"]
    # The new process holds the name now.
    heard.hear(3.0, events=(exited(old),))
    assert heard.names(3.0, sample("c-1")) != ["rollout/32"] and "alive on b-1 and on c-1" in caplog.text


def test_two_nodes_that_change_ranks_keep_their_names(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    old = [sample("a-1", "trainer/0", 0), sample("b-1", "trainer/0", 1)]
    heard.hear(0.0, *old)
    heard.hear(2.0, events=(exited(old[0]), exited(old[1])))
    new = sample("a-1", "trainer/0", 1), sample("b-1", "trainer/0", 0)
    assert heard.names(4.0, *new) == heard.names(5.0, *new) == ["trainer/0"] * 2
    assert not caplog.records


def test_a_clock_that_is_set_back_holds_no_place(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    heard.hear(5000.0, sample("a-1"))
    assert heard.names(1000.0, sample("b-1")) == ["rollout/32"]
    assert not caplog.records


def test_processes_of_a_counted_incarnation_are_never_renamed(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    both = sample("a-1", incarnation=1), sample("b-1", incarnation=2)
    assert heard.names(0.0, *both) == ["rollout/32"] * 2
    assert not caplog.records


def test_retained_state_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.watch.agents.NUM_PLACES_MAX", 4)
    heard = Heard()
    for n in range(20):
        heard.hear(n * HELD_SECONDS * 2, sample("a-1", f"rollout/{n}"))
    assert len(heard.places._holders) <= 4


def test_a_replacement_that_starts_elsewhere_while_the_old_process_lingers_has_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It ignores SIGTERM: both run for half a minute, and the exit is not seen if the agent ends with the pod."""
    heard, old, new = Heard(), sample("a-1"), sample("b-1")
    heard.hear(0.0, old)
    heard.ending.add(old.process)
    for at, running in ((1.0, [old, new]), (2.0, [new, old]), (3.0, [new])):
        assert set(heard.names(at, *running)) == {"rollout/32"}
    assert not caplog.records
    assert heard.names(4.0, new, sample("c-1"))[1] != "rollout/32", "the replacement holds the name"
