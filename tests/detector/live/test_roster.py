"""Who is there, by name, role and replica."""

from dataclasses import replace

from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import NO_PAGE, UNCOUNTED, Phase, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses, ProcessIndex


def made(replica: str, rank: int = 0, incarnation: int = 1) -> MonitoredProcess:
    return MonitoredProcess(replica, replica.partition("/")[0], rank, incarnation, "node-0", None, seen_wall=0.0)


def test_one_of_the_same_key_takes_the_place_of_the_other() -> None:
    roster, first, second = ProcessIndex(), made("rollout/0"), made("rollout/0")
    roster.add(first)
    roster.add(second)
    assert list(roster) == [second]
    roster.remove(first)  # it is not there any more: nothing happens
    assert list(roster.of_role("rollout").values()) == [second]
    roster.remove(second)
    assert not roster.of_role("rollout") and not roster.of_replica("rollout/0") and not list(roster)


def test_replicas_with_a_process_that_is_there_are_counted() -> None:
    roster = ProcessIndex()
    for s in (made("trainer/0", 0), made("trainer/0", 1), made("trainer/1"), made("rollout/0")):
        roster.add(s)
    assert roster.sizes() == {"trainer": 2, "rollout": 1}
    gone = roster.of_replica("trainer/1")[("trainer/1", 0, 1)]
    gone.exit_wall = 5.0
    roster.note_gone(gone)
    assert roster.sizes() == {"trainer": 1, "rollout": 1} and list(roster.gone.values()) == [gone]
    roster.remove(gone)
    assert not roster.gone and not roster.of_replica("trainer/1")


def test_a_process_that_was_found_and_then_reports_is_no_longer_uninstrumented() -> None:
    fleet = MonitoredProcesses()
    found = ProcessSample(
        process=ProcessId(node=NodeId("node-0"), pid=7, start_ticks=1),
        role="trainer",
        replica="trainer/0",
        rank=0,
        incarnation=UNCOUNTED,
        at=1.0,
        wall_at=1.0,
        alive=True,
        page_ok=False,
        phase=NO_PAGE,
    )
    for sample in (found, replace(found, at=2.0, phase=Phase.STEP, step=3, progress=40, page_ok=True)):
        at = {"at": sample.at, "wall_at": sample.at}
        batch = SampleBatch(node=NodeId("node-0"), agent_pid=1, cursor=0, lost=0, processes=(sample,), hosts=(), **at)
        fleet.ingest(Observation(wall_at=sample.at, batches=(batch,)))
        unpaged = fleet.unpaged()
        assert len(unpaged) == (sample is found)
    [subject] = fleet.roster
    assert subject.reports and subject.worked == 40
