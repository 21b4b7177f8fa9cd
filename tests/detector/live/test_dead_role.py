"""All processes of a role are gone and the rest of the job waits: one finding, which names the first and why."""

from dataclasses import dataclass, replace

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.telemetry import NO_PAGE, AgentEventKind, ProcessSample
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.processes import UNCOUNTED_GONE_SECONDS
from rolecall.detector.live.stages.exits.dead_role import SETTLE_SECONDS
from rolecall.detector.live.stages.exits.uninstrumented import ENDED_SECONDS
from tests.detector.live.test_uninstrumented import ASKED, ERROR, KILLED, Job
from tests.detector.live.torchrun_job import Rank, TorchrunJob

OOM = {"signal": "9", "cause": "oom"}
ENDED = {"code": "0", "cause": "finished"}


@pytest.fixture
def job() -> Job:
    it = Job()
    assert not it.run(3)
    return it


def test_every_engine_is_killed_at_once(job: Job) -> None:
    job.ends("rollout/1:0", OOM)
    job.run(1)
    job.ends("rollout/0:0", KILLED)
    standing = job.run(5)
    (key,) = standing
    assert key == "crash:rollout/1#0:dead_role:rollout"
    said = standing[key]
    assert said.startswith(
        "every rollout of the job is gone (2 replicas), and trainer/0 ranks 0-3 wait for it: first, "
    )
    assert "rollout/1 rank 0 (node-2, pid 1005) crashed: process exited on signal 9; the host's OOM killer" in said
    assert "1 more of its job exited after it: rollout/0 rank 0 (node-1, pid 1004) on signal 9" in said


def test_one_after_the_other_is_the_incident_of_the_first(job: Job) -> None:
    job.ends("rollout/0:0", KILLED)
    assert set(job.run(100)) == {"crash:rollout/0#0"}
    job.ends("rollout/1:0", {"signal": "11", "cause": "crashed"})
    assert set(job.run(SETTLE_SECONDS + 5)) == {"crash:rollout/0#0:dead_role:rollout"}
    assert len(job.run(UNCOUNTED_GONE_SECONDS + 100)) == 1, "as long as the trainers wait"
    job.pids["rollout/0:0"] = 2000
    job.tell(AgentEventKind.REGISTERED, "rollout/0:0", {})
    assert not job.run(10), "one runs again"


def test_every_trainer_is_gone_and_the_engines_have_nothing_to_do(job: Job) -> None:
    job.ends("trainer/0:2", KILLED)
    job.run(1)
    for n in (0, 1, 3):
        job.ends(f"trainer/0:{n}", ERROR)
    assert set(job.run(5)) == {"crash:trainer/0#0"}
    standing = job.run(SETTLE_SECONDS)
    assert set(standing) == {"crash:trainer/0#0:dead_role:trainer"}
    said = standing.popitem()[1]
    assert said.startswith("every trainer of the job is gone (1 replica, 4 processes), and rollout/0, rollout/1 wait")
    assert "first, trainer/0 rank 2 (node-2, pid 1002) crashed: process exited on signal 9" in said


@pytest.mark.parametrize("how", [ENDED, ASKED])
def test_engines_that_were_all_ended_as_if_the_job_were_over(job: Job, how: dict[str, str]) -> None:
    job.ends("rollout/0:0", how)
    job.ends("rollout/1:0", how)
    assert not job.run(ENDED_SECONDS - 5)
    standing = job.run(20)
    assert set(standing) == {"crash:rollout/0#0:dead_role:rollout"}


def test_what_ends_with_its_job_is_no_dead_role(job: Job) -> None:
    for name in ("rollout/0:0", "rollout/1:0"):
        job.ends(name, ASKED)
    job.run(ENDED_SECONDS - 10)
    for n in range(4):
        job.ends(f"trainer/0:{n}", ENDED)
    assert not job.run(3 * ENDED_SECONDS)


def test_engines_that_end_because_a_trainer_died_are_not_the_first(job: Job) -> None:
    job.ends("trainer/0:2", KILLED)
    job.run(2)
    job.ends("rollout/0:0", ERROR)
    job.ends("rollout/1:0", ERROR)
    standing = job.run(2 * ENDED_SECONDS)
    assert set(standing) == {"crash:trainer/0#0"}


def test_a_role_that_is_not_all_dead_keeps_its_own_findings(job: Job) -> None:
    job.ends("rollout/0:0", KILLED)
    assert set(job.run(30)) == {"crash:rollout/0#0"}


def test_it_survives_a_restart_of_the_watch(job: Job) -> None:
    job.ends("rollout/0:0", KILLED)
    job.ends("rollout/1:0", KILLED)
    before = job.run(10)
    job.detector = LiveDetector.resumed(DetectorConfig(), {}, job.detector.state())
    assert job.run(UNCOUNTED_GONE_SECONDS + 60) == before


@dataclass
class MixedJob(TorchrunJob):
    """A trainer that reports its steps, and engines that report nothing."""

    def event(self, kind: AgentEventKind, r: Rank, ago: float = 0.0, **detail: str) -> None:
        super().event(kind, r, ago, **detail)
        self._events[-1] = replace(self._events[-1], role=r.replica.partition("/")[0])

    def _sample(self, r: Rank) -> ProcessSample:
        sample = replace(super()._sample(r), role=r.replica.partition("/")[0])
        return sample if sample.role == "trainer" else replace(sample, page_ok=False, phase=NO_PAGE)


def test_a_trainer_that_waits_for_dead_engines_is_not_hung() -> None:
    engines = Rank(0, 300, "rollout/0"), Rank(0, 301, "rollout/1")
    it = MixedJob([Rank(0, 100), *engines])
    assert it.run(20.0) == []
    for engine in engines:
        it.exits(engine, signal="9")
    (found,) = it.run(120.0)
    assert found.key == "crash:rollout/0#0:dead_role:rollout"
    assert "rollout of the job is gone (2 replicas), and trainer/0 waits for it" in found.because
