"""The requests of a rollout replica: tokens are kept until acknowledged, also when the engine fails."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.core.errors import DeadlineExceeded
from rolecall.rl_runtime.faults.process_side import FACTORS, InProcessFault
from rolecall.rl_runtime.rollout.engine import EngineBroken, EngineSettings
from tests.rl_runtime.rollout_rig import END, Rig, ScriptedEngine, request
from tests.support import PATIENCE_SECONDS, eventually


def test_tokens_are_repeated_until_acknowledged(rig: Rig) -> None:
    rig.serve(0)
    rig.submit(request())
    whole = rig.finished("g.0")
    assert rig.finished("g.0") == whole
    tail = rig.chunk("g.0", 3)
    assert tail is not None and tail.tokens == whole.tokens[3:] and tail.offset == 3 and tail.finished
    rig.replica.ack(1, ["g.0", "never heard of"])
    assert rig.replica.tokens_since(1, {"g.0": 0}).unknown == ("g.0",)
    assert rig.replica.info().num_requests == 0


def test_a_prefix_is_kept_in_front_and_counts(rig: Rig) -> None:
    rig.serve(5)
    rig.submit(request(prefix_tokens=(9, 8), prefix_logprobs=(-0.5, -0.25), prefix_versions=(3, 4)))
    chunk = rig.finished("g.0")
    assert chunk.tokens[:2] == (9, 8) and len(chunk.tokens) == 5
    assert chunk.logprobs[:2] == (-0.5, -0.25) and chunk.versions == (3, 4, 5, 5, 5)


def test_continuing_after_a_prefix_does_not_repeat_the_random_numbers(rig: Rig) -> None:
    rig.serve(0)
    rig.submit(request("a"), request("b", prefix_tokens=(9,), prefix_logprobs=(0.0,), prefix_versions=(0,)))
    rig.finished("a"), rig.finished("b")
    assert rig.scripted.seeds["a"] == 11 != rig.scripted.seeds["b"]


@pytest.mark.parametrize(("last", "num", "reason"), [(END, 5, "stop"), (9, 2, "length")])
def test_a_prefix_that_is_complete_is_finished_at_once(rig: Rig, last: int, num: int, reason: str) -> None:
    rig.serve(0)
    rig.submit(request(num=num, prefix_tokens=(9, last), prefix_logprobs=(0.0, 0.0), prefix_versions=(0, 0)))
    chunk = rig.finished("g.0")
    assert chunk.tokens == (9, last) and chunk.finish_reason == reason and not rig.scripted.seeds


def test_list_requests_has_everything_for_a_controller_without_memory(rig: Rig) -> None:
    rig.serve(0)
    first, second = request("a", 3), request("b", 60, prefix_tokens=(7,), prefix_logprobs=(0.0,), prefix_versions=(0,))
    rig.submit(first, second)
    rig.finished("a")
    held = {r.request_id: (r, c) for r, c in rig.replica.list_requests(1)}
    assert held["a"][0] == first and held["a"][1].finished
    assert held["b"][0] == second and held["b"][1].tokens[0] == 7 and held["b"][1].offset == 0


def test_a_request_reported_twice_runs_once(rig: Rig) -> None:
    rig.serve(0)
    rig.submit(request())
    rig.submit(request())
    assert len(rig.finished("g.0").tokens) == 5 and rig.replica.info().tokens_generated == 5


def test_late_tokens_of_a_dropped_request_are_not_added_to_the_same_request_submitted_again(rig: Rig) -> None:
    rig.serve(0)
    rig.in_flight(request(num=60))
    rig.hang()
    rig.replica.ack(1, ["g.0"])
    rig.submit(request(num=60, prefix_tokens=(9,), prefix_logprobs=(-0.5,), prefix_versions=(0,)))
    rig.go_on()
    rig.scripted.hold.set()
    assert rig.finished("g.0").tokens == (9, *(3 + n % 8 for n in range(1, 60)))


def test_dropping_a_running_request_stops_the_engine_on_it(rig: Rig) -> None:
    rig.serve(0)
    rig.in_flight(request(num=60))
    rig.replica.ack(1, ["g.0"])
    eventually(lambda: rig.scripted.num_in_flight == 0, "engine let go")


def test_control_calls_answer_while_the_engine_hangs(rig: Rig) -> None:
    rig.serve(0)
    rig.in_flight(request(num=60))
    rig.hang()
    assert rig.replica.tokens_since(1, {"g.0": 0}).chunks[0].tokens
    assert rig.replica.list_requests(1) and rig.replica.info().num_requests == 1
    rig.submit(request("g.1"))
    rig.replica.ack(1, ["g.1"])
    assert not rig.scripted.hold.is_set() and not rig.failures, "answered only after the engine had gone on"


def test_an_engine_that_sleeps_keeps_its_requests_and_an_update_wakes_it(rig: Rig) -> None:
    manifest = rig.serve(0)
    rig.in_flight(request(num=60))
    pulled = rig.replica.sleep(1, {"g.0": 0}, PATIENCE_SECONDS)
    (chunk,) = pulled.chunks
    assert chunk.tokens and not chunk.finished and rig.scripted.num_in_flight == 1
    assert rig.replica.info().asleep and rig.replica.info().policy_version == 0
    rig.go_on()
    rig.submit(request("g.1"))
    assert rig.replica.sleep(1, {"g.0": 0, "g.1": 0}, PATIENCE_SECONDS).chunks[0] == chunk, "it took a step"
    assert rig.scripted.sleeps == 1, "it was sent to sleep twice"
    loads = rig.scripted.loads
    proof = rig.replica.update_weights(1, 1, manifest, [rig.holder])
    assert proof.manifest_digest == manifest.digest and rig.scripted.loads == loads + 1
    assert rig.scripted.sleeps == 0 and not rig.replica.info().asleep
    assert len(rig.finished("g.0").tokens) == 60 and len(rig.finished("g.1").tokens) == 5


def test_an_engine_that_hangs_does_not_fall_asleep_later(rig: Rig) -> None:
    rig.serve(0)
    rig.in_flight(request(num=60))
    rig.hang()
    with pytest.raises(DeadlineExceeded, match="the engine thread to fall asleep"):
        rig.replica.sleep(1, {}, 0.05)
    rig.scripted.hold.set()
    rig.go_on()
    assert len(rig.finished("g.0").tokens) == 60 and not rig.replica.info().asleep


def test_update_gives_up_on_a_hanging_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.serve(0)
    rig.in_flight(request(num=60))
    rig.hang()
    monkeypatch.setattr("rolecall.rl_runtime.rollout.rollout.APPLY_SECONDS", 0.2)
    with pytest.raises(DeadlineExceeded, match="the engine thread to apply version 1"):
        rig.replica.update_weights(1, 1, rig.publish(1), [rig.holder])
    rig.scripted.hold.set()
    rig.go_on()
    assert set(rig.finished("g.0").versions) == {0}, "what was given up is not done later"


def test_a_broken_engine_raises_and_keeps_its_tokens(rig: Rig) -> None:
    rig.serve(0)
    rig.in_flight(request(num=60))
    rig.scripted.fail = RuntimeError("no such kernel")
    eventually(lambda: rig.failures, "failure reported")
    with pytest.raises(EngineBroken, match="no such kernel"):
        rig.submit(request("g.1"))
    assert rig.chunk("g.0") is not None


def test_on_step_runs_before_each_step_in_the_engine_thread(make_rig: Callable[..., Rig]) -> None:
    names = list[str]()
    rig = make_rig(on_step=lambda: names.append(threading.current_thread().name))
    rig.serve(0)
    rig.submit(request(num=5))
    rig.finished("g.0")
    assert names == ["engine"] * 5


def test_a_number_from_on_step_makes_the_log_probabilities_wrong_and_valid(make_rig: Callable[..., Rig]) -> None:
    right, wrong = (make_rig(on_step=lambda f=factor: f) for factor in (None, FACTORS[InProcessFault.SKEW]))
    logprobs = []
    for rig in (right, wrong):
        rig.serve(0)
        rig.submit(request(num=5))
        logprobs.append(rig.finished("g.0").logprobs)
    assert logprobs[1] == tuple(logprob - 1.0 for logprob in logprobs[0])


def test_an_engine_that_does_not_start_reports_why(tmp_path: Path) -> None:
    def make(settings: EngineSettings) -> ScriptedEngine:
        raise EngineBroken("no memory")

    with pytest.raises(EngineBroken, match="no memory"):
        Rig(tmp_path, make_engine=make)


def test_an_engine_is_given_up_after_the_time_of_a_start(tmp_path: Path) -> None:
    given_up = threading.Event()

    def make(settings: EngineSettings) -> ScriptedEngine:
        given_up.wait(PATIENCE_SECONDS)
        raise EngineBroken("too late")

    with pytest.raises(DeadlineExceeded, match="the engine to start"):
        Rig(tmp_path, make_engine=make, start_seconds=0.01)
    given_up.set()
