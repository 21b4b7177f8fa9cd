"""An engine's own metrics as progress of a process that reports nothing."""

from collections.abc import Iterable

import pytest

from rolecall.agent.collectors.base import CollectorReading
from rolecall.agent.collectors.engine.activity import STALE_SECONDS, EngineActivity
from rolecall.agent.collectors.engine.collector import EngineCollector, EngineEndpoint
from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Fate
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import NO_PAGE, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.stages.progress.engine import EngineProgress
from tests.agent.page_server import PageServer, http_page

NODE = NodeId("node-1")
SGLANG = 'sglang:num_running_reqs{{}} {running}\nsglang:realtime_tokens_total{{mode="decode"}} {tokens}\n'
PAGE = 'vllm:num_requests_running{{engine="0"}} {running}\nvllm:generation_tokens_total{{engine="0"}} {tokens}\n'


def reading(running: int, tokens: int, more: str = "", page: str = PAGE) -> CollectorReading:
    """As the real collector reads it from a page."""
    server = PageServer(http_page(page.format(running=running, tokens=tokens) + more))
    try:
        return EngineCollector(NODE, [EngineEndpoint(server.url, "rollout", "rollout/3", 0)]).read(0.0)
    finally:
        server.close()


def activity(polls: Iterable[tuple[float, CollectorReading]]) -> EngineActivity:
    newest = iter(polls)
    return EngineActivity(lambda: next(newest))


def test_tokens_and_running_requests_are_those_of_the_newest_poll() -> None:
    engine = activity([(10.0, reading(4, 100)), (15.0, reading(0, 150))])
    assert engine.fields("rollout/3", 0, 11.0) == {"tokens": 100, "requests_active": 4}
    assert engine.fields("rollout/3", 0, 16.0) == {"tokens": 150, "requests_active": 0}


def test_a_sleeping_engine_runs_nothing() -> None:
    asleep = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
    assert activity([(10.0, reading(4, 100, asleep))]).fields("rollout/3", 0, 11.0)["requests_active"] == 0


@pytest.mark.parametrize(("replica", "now"), [("rollout/4", 11.0), ("rollout/3", 11.0 + STALE_SECONDS)])
def test_other_processes_and_old_values_have_no_fields(replica: str, now: float) -> None:
    assert activity([(10.0, reading(4, 100))]).fields(replica, 0, now) == {}


def test_an_engine_of_sglang_is_never_found_to_hang_by_its_metrics() -> None:
    """Its requests are those of its last log: it may be idle, or paused for a weight update, while they are exported."""
    assert activity([(10.0, reading(4, 100, page=SGLANG))]).fields("rollout/3", 0, 11.0) == {}


def observe(detector: LiveDetector, now: float, fields: dict[str, int], pid: int = 7) -> list[Diagnosis]:
    """What stands after a sample of the engine's process with these fields."""
    sample = ProcessSample(
        process=ProcessId(node=NODE, pid=pid, start_ticks=1),
        role="rollout",
        replica="rollout/3",
        rank=0,
        incarnation=0,
        at=now,
        wall_at=1e9 + now,
        alive=True,
        page_ok=False,
        phase=NO_PAGE,
        **fields,  # type: ignore[arg-type]
    )
    batch = SampleBatch(
        node=NODE, agent_pid=1, cursor=0, lost=0, at=now, wall_at=1e9 + now, processes=(sample,), hosts=()
    )
    return detector.observe(Observation(wall_at=1e9 + now, batches=(batch,)))


def diagnoses(running: int, hangs_at: float, until: float) -> list[Diagnosis]:
    """Of an engine that generates until `hangs_at`, whose page is read every five seconds."""
    detector, standing = LiveDetector(DetectorConfig(), {}), list[Diagnosis]()
    newest = (0.0, CollectorReading())
    engine = EngineActivity(lambda: newest)
    values = {tokens: reading(running, tokens) for tokens in range(0, 100 * int(hangs_at) + 100, 500)}
    for n in range(int(until / 0.2)):
        now = 0.2 * n
        if n % 25 == 0:
            tokens = 500 * int(min(now, hangs_at) * 100 // 500)
            newest = (now, values[tokens]) if newest[1] is not values[tokens] else (now, reading(running, tokens))
        standing = observe(detector, now, engine.fields("rollout/3", 0, now))
        if standing:
            break
    return standing


def test_an_engine_whose_server_answers_while_it_generates_nothing_is_hung() -> None:
    (found,) = diagnoses(running=4, hangs_at=90.0, until=150.0)
    assert found.fault_class is FaultClass.HANG and found.suspects[0].replica == "rollout/3"
    assert "runs 4 requests and has generated no token" in found.because


UNREAD: dict[str, int] = {}


def busy(tokens: int) -> dict[str, int]:
    return {"tokens": tokens, "requests_active": 4}


def hung_engine() -> tuple[LiveDetector, Diagnosis]:
    """Of an engine that generates until 10 s, and was found to hang at 60 s."""
    detector = LiveDetector(DetectorConfig(), {})
    for now in range(61):
        standing = observe(detector, float(now), busy(100 * min(now, 10)))
    (found,) = standing
    return detector, found


def test_an_engine_that_hangs_does_so_while_its_metrics_are_not_read_until_it_generates() -> None:
    detector, found = hung_engine()
    for now in range(61, 200):
        assert observe(detector, float(now), UNREAD) == [found]
    assert detector.fate(found.suspects[0])[0] is Fate.UNKNOWN
    assert observe(detector, 200.0, busy(1000)) == [found]
    assert observe(detector, 201.0, busy(1001)) == []


def test_another_process_under_the_name_of_a_hung_engine_is_not_hung() -> None:
    detector, _ = hung_engine()
    assert observe(detector, 61.0, UNREAD, pid=8) == []


def test_a_time_in_which_metrics_were_not_read_is_no_time_without_a_token() -> None:
    detector = LiveDetector(DetectorConfig(), {})
    for now in range(10):
        observe(detector, float(now), busy(100 * now))
    for now in range(10, 100):
        assert observe(detector, float(now), UNREAD) == []
    for now in range(100, 130):
        assert observe(detector, float(now), busy(900)) == []
    (found,) = observe(detector, 130.0, busy(900))
    assert "no token for 30 s" in found.because


def test_an_engine_without_requests_is_idle() -> None:
    assert diagnoses(running=0, hangs_at=60.0, until=120.0) == []


def test_a_pause_that_an_engine_has_survived_is_waited_for_three_times_as_long() -> None:
    progress = EngineProgress(tokens=0, moved_at=0.0)
    for at, tokens in ((5.0, 100), (10.0, 200), (50.0, 300)):
        progress.advance(at, tokens, 4)
    assert progress.longest == 40.0 and progress.deadline_seconds == 120.0
    progress.advance(60.0, 300, 0)
    progress.advance(160.0, 300, 4)
    assert progress.stalled_seconds(170.0) == 10.0, "it had no requests in between"
