"""What Ray's logs say about the exit of a worker: it explains a crash, or shows that there was none."""

import pytest

from rolecall.core.telemetry import AgentEventKind
from rolecall.detector.live.stages.exits.ray_deaths import WORD_SECONDS
from rolecall.detector.live.stages.exits.uninstrumented import ENDED_SECONDS
from tests.detector.live.test_uninstrumented import Job

KILLED = {"signal": "9", "cause": "killed", "ray": "worker"}
CODE_0 = {"code": "0", "cause": "finished", "ray": "worker"}
CODE_1 = {"code": "1", "cause": "exit", "ray": "worker"}


@pytest.fixture
def job() -> Job:
    it = Job()
    assert not it.run(3)
    return it


def says(job: Job, name: str, reason: str, text: str = "Ray says why", **more: str) -> None:
    job.tell(AgentEventKind.RAY_WORKER_ENDED, name, {"reason": reason, "text": text, **more})


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (KILLED, "no_word"),
        (KILLED, "out_of_memory"),
        (CODE_0, "creation_failed"),
        (CODE_0, "exited"),
        (CODE_1, "of a later version"),
    ],
)
def test_the_finding_of_an_exit_says_what_ray_says(job: Job, how: dict[str, str], reason: str) -> None:
    job.ends("rollout/0:0", how)
    says(job, "rollout/0:0", reason, "7.81GB of 23.54GB", line="Selected to kill", log_file="/tmp/ray/worker.log")
    standing = job.run(6)
    assert set(standing) == {"crash:rollout/0#0"} and standing["crash:rollout/0#0"].endswith("; 7.81GB of 23.54GB")
    (diagnosis,) = job.detector._standing.values()
    assert {"ray", "log_file"} <= {e.kind for e in diagnosis.evidence}
    (ended,) = [e for e in diagnosis.evidence if e.kind == "exit"]
    assert bool(ended.values.get("oom")) == (reason == "out_of_memory")


def test_an_exit_of_a_worker_waits_for_rays_word_and_not_for_long(job: Job) -> None:
    job.ends("rollout/0:0", KILLED)
    assert not job.run(WORD_SECONDS)
    assert set(job.run(2)) == {"crash:rollout/0#0"}, "an agent without access to Ray's logs"


@pytest.mark.parametrize("reason", ["ray_kill", "out_of_scope", "left", "owner_died", "node_stopped"])
def test_what_the_job_ended_is_no_crash_unless_it_is_missed(job: Job, reason: str) -> None:
    job.ends("rollout/0:0", CODE_1)
    says(job, "rollout/0:0", reason)
    assert not job.run(ENDED_SECONDS - 5)
    standing = job.run(20)
    assert "ended with code 1, and trainer/0 ranks 0-3 of its job went on" in standing["crash:rollout/0#0"]
    assert standing["crash:rollout/0#0"].endswith("Ray says why")


def test_an_actor_whose_owner_crashed_is_a_consequence(job: Job) -> None:
    job.ends("trainer/0:2", KILLED)
    says(job, "trainer/0:2", "no_word")
    job.run(1)
    job.ends("rollout/0:0", CODE_1)
    says(job, "rollout/0:0", "owner_died")
    assert set(job.run(ENDED_SECONDS + 10)) == {"crash:trainer/0#0"}


def test_actors_that_ended_with_their_raylet_are_one_lost_node(job: Job) -> None:
    for name in ("trainer/0:2", "trainer/0:3", "rollout/1:0"):
        job.ends(name, CODE_1)
        says(job, name, "node_lost", "the raylet (pid 7) died")
    standing = job.run(6)
    (key,) = standing
    assert key.startswith("node_lost:")
    assert standing[key] == (
        "node-2 has left the Ray cluster, and rollout/1, trainer/0 ranks 2-3 ended with it: the raylet (pid 7) died"
    )


def test_a_job_all_of_whose_actors_end_alike_was_stopped_unless_its_node_was_lost(job: Job) -> None:
    for name in job.who:
        job.ends(name, CODE_1)
        says(job, name, "no_word")
    assert not job.run(10)
    other = Job()
    other.run(3)
    for name in other.who:
        other.ends(name, CODE_1)
        says(other, name, "node_lost")
    assert all(key.startswith("node_lost:") for key in other.run(10)) and other.run(1)
