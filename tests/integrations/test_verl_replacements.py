"""A standalone rollout replica of verl is replaced at weight updates: phases, refusals, and what fails."""

import asyncio
from types import SimpleNamespace

import pytest

from rolecall.integrations.verl_replacements import KEPT_MAX, ROUTE_SECONDS, START_SECONDS, Refused
from tests.integrations.verl_fake import FakeJob, Manager, Replica, fake_job


def started(job: FakeJob, key: str = "k") -> FakeJob:
    """The new engine of replica 1 runs, and has no weights."""
    job.update()
    job.replacements.order(key, 1, "e1", 60)
    job.update()
    job.run_threads()
    assert job.phase(key) == "started"
    return job


def refused(job: FakeJob, number: int, instance: str, key: str = "k") -> tuple[int, str]:
    with pytest.raises(Refused) as e:
        job.replacements.order(key, number, instance, 60)
    return e.value.status, str(e.value)


def test_a_replica_is_replaced_at_weight_updates_and_no_other_is_touched() -> None:
    job = fake_job()
    job.update()
    assert job.replacements.order("k", 1, "e1", 60)["phase"] == "waiting"
    assert job.manager.updated == [["e0", "e1", "e2"]] and job.cluster.ended == [], "an order changes nothing"

    job.update()  # it leaves before the update: one that hangs would hold it up
    assert job.manager.updated[-1] == ["e0", "e2"] and job.balancer.engines == {"e0", "e2"}
    assert job.phase("k") == "starting"
    job.update()
    assert job.manager.updated[-1] == ["e0", "e2"], "the trainer waits for no engine"
    job.run_threads()
    assert job.cluster.ended == ["e1"] and job.phase("k") == "started"
    assert job.balancer.engines == {"e0", "e2"}, "it has old weights"

    job.update()
    assert job.manager.updated[-1] == ["e0", "e2", "new-1"] and job.balancer.engines == {"e0", "e2", "new-1"}
    assert job.phase("k") == "serving"
    job.update()
    assert job.cluster.ended == ["e1"] and job.threads == []
    assert [e["instance"] for e in job.replacements.listing()] == ["e0", "new-1", "e2"]


def test_the_same_key_is_the_same_order() -> None:
    job = fake_job()
    job.update()
    for _ in range(2):
        job.replacements.order("k", 1, "e1", 60)
    job.update()
    assert job.replacements.order("k", 1, "e1", 60)["phase"] == "starting"
    job.run_threads()
    job.update()
    assert job.replacements.order("k", 1, "e1", 60)["phase"] == "serving"
    job.update()
    assert job.cluster.ended == ["e1"]
    assert refused(job, 2, "e2")[0] == 409, "the key of another one"


def test_only_what_was_meant_is_replaced() -> None:
    job = fake_job()
    job.update()
    assert refused(job, 1, "e0") == (409, "replica 1 is engine e1 by now")
    assert refused(job, 7, "e7")[0] == 404
    job.replacements.order("k", 1, "e1", 60)
    assert refused(job, 2, "e2", "other") == (409, "replica 1 is being replaced (waiting): one at a time")
    job.manager.replicas[1].engine = "e1-again"  # the job has started another one since
    job.update()
    assert job.replacements.state("k") == {
        "key": "k",
        "replica": 1,
        "phase": "failed",
        "because": "another engine runs by now",
    }
    assert job.cluster.ended == [] and len(job.manager.replicas) == 3


@pytest.mark.parametrize(
    ("fields", "backend", "why"),
    [
        (
            {"mode": "hybrid"},
            "naive",
            "it shares its devices with the trainer (mode hybrid), and cannot be replaced alone",
        ),
        ({"mode": "colocated"}, "nccl", "it shares its devices with the trainer (mode colocated)"),
        ({"resumes": False}, "nccl", "its clients would not take up an interrupted request elsewhere"),
        (
            {"config": SimpleNamespace(disaggregation=SimpleNamespace(enabled=True))},
            "nccl",
            "its prefill and decode engines are separate",
        ),
    ],
)
def test_what_cannot_be_replaced_alone_is_told(fields: dict[str, object], backend: str, why: str) -> None:
    job = fake_job(**fields)
    job.manager.backend = backend
    job.update()
    assert all(why in entry["refusal"] for entry in job.replacements.listing())
    assert why in refused(job, 1, "e1")[1]
    job.update()
    assert job.manager.updated == [["e0", "e1", "e2"]] * 2


def test_the_last_one_is_kept() -> None:
    job = fake_job(1)
    job.manager.replicas.append(Replica(1, "hybrid", mode="hybrid"))
    job.update()
    assert "no other standalone replica would take its requests" in refused(job, 0, "e0")[1]


def test_replicas_of_the_trainer_are_listed_beside_the_others() -> None:
    job = fake_job()
    job.update()
    hybrids = Manager([Replica(3, "h3", mode="hybrid")], backend="naive")
    hybrids.update(job.replacements)
    listed = {e["replica"]: e["refusal"] for e in job.replacements.listing()}
    assert listed[0] == "" and "cannot be replaced alone" in listed[3]


def test_a_replica_that_has_ended_is_left_out_and_replaced_when_ordered() -> None:
    job = fake_job()
    job.update()
    job.cluster.dead.add("e1")
    job.update()
    assert job.manager.updated[-1] == ["e0", "e2"] and job.balancer.engines == {"e0", "e2"}
    job.update()
    assert job.threads == [] and job.cluster.ended == [], "without an order nothing is replaced"
    listed = next(e for e in job.replacements.listing() if e["replica"] == 1)
    assert (listed["instance"], listed["state"]) == ("e1", "ended") and not listed["processes"][0]["alive"]
    job.replacements.order("k", 1, "e1", 60)
    job.update()
    job.run_threads()
    job.update()
    assert job.phase("k") == "serving" and job.manager.updated[-1] == ["e0", "e2", "new-1"]


def test_the_last_replica_that_has_ended_is_left_to_verl() -> None:
    job = fake_job(2)
    job.update()
    job.cluster.dead.update({"e0", "e1"})
    job.update()
    assert job.manager.updated[-1] == ["e1"]


def test_an_order_comes_before_the_end_that_it_is_for() -> None:
    job = fake_job()
    job.update()
    job.replacements.order("k", 1, "e1", 60)
    job.cluster.dead.add("e1")
    job.update()
    assert job.phase("k") == "starting"
    job.run_threads()
    job.update()
    assert refused(job, 1, "e1", "again")[1] == "replica 1 is engine new-1 by now"


def test_updates_of_other_managers_change_nothing() -> None:
    job, others = fake_job(), Manager([Replica(7, "t7"), Replica(8, "t8")])
    job.update()
    others.update(job.replacements)
    job.replacements.order("k", 1, "e1", 60)
    others.update(job.replacements)
    assert job.phase("k") == "waiting"
    job.update()
    job.run_threads()
    others.update(job.replacements)
    assert job.phase("k") == "started" and others.updated[-1] == ["t7", "t8"]
    job.update()
    assert job.phase("k") == "serving"


def test_an_order_that_no_update_took_up_is_withdrawn() -> None:
    job = fake_job()
    job.update()
    job.replacements.order("k", 1, "e1", 60)
    job.now.seconds += 61
    job.update()
    assert job.phase("k") == "failed" and job.manager.updated[-1] == ["e0", "e1", "e2"]
    job.replacements.order("again", 1, "e1", 60)
    job.update()
    assert job.phase("again") == "starting"


def test_an_engine_that_no_update_takes_up_is_given_up_and_ended() -> None:
    job = started(fake_job())
    job.now.seconds += 61
    assert job.replacements.state("k") == {
        "key": "k",
        "replica": 1,
        "phase": "failed",
        "because": "the new engine ran, and no weight update began within 60 s",
    }
    job.run_threads()
    assert job.cluster.ended == ["e1", "new-1"], "it holds no devices any more"
    job.update()
    assert job.manager.updated[-1] == ["e0", "e2"] and job.phase("k") == "failed"
    job.replacements.order("again", 1, "e1", 60)
    job.update()
    job.run_threads()
    job.update()
    assert job.phase("again") == "serving" and job.manager.updated[-1] == ["e0", "e2", "new-2"]


def test_one_that_is_given_up_is_told_without_a_further_update() -> None:
    """A listing, or an order for another replica, says so, too: this one cannot be ordered again."""
    job = started(fake_job())
    job.now.seconds += 61
    assert job.replacements.order("other", 2, "e2", 60)["phase"] == "waiting", "one at a time, and that one is over"
    job.run_threads()
    assert job.cluster.ended == ["e1", "new-1"]


def test_an_update_that_does_not_end_gives_the_new_engine_up() -> None:
    job = started(fake_job())
    asyncio.run(job.replacements.before_update(job.manager))
    assert job.phase("k") == "joining"
    job.now.seconds += 61
    state = job.replacements.state("k")
    assert state is not None and state["phase"] == "failed"
    assert state["because"].endswith("within 60 s of its weight update (the new engine gets weights)")
    assert job.threads == [] and "new-1" in [r.engine for r in job.manager.replicas], "it is part of that update"
    asyncio.run(job.replacements.after_update(job.manager))
    job.run_threads()
    assert [r.engine for r in job.manager.replicas] == ["e0", "e2"] and job.cluster.ended == ["e1", "new-1"]
    assert "new-1" not in job.balancer.engines


def test_a_balancer_that_never_takes_the_new_engine_ends_the_order() -> None:
    job = started(fake_job())
    job.balancer.fails = True
    job.update()
    assert job.phase("k") == "joining"
    job.now.seconds += ROUTE_SECONDS + 1
    job.balancer.fails = False
    job.update()
    job.run_threads()
    state = job.replacements.state("k")
    assert state is not None and state["phase"] == "failed" and "the balancer did not take" in state["because"]
    assert job.manager.updated[-1] == ["e0", "e2"] and job.cluster.ended == ["e1", "new-1"]


def test_a_balancer_that_does_not_answer_keeps_the_replica() -> None:
    job = fake_job()
    job.update()
    job.replacements.order("k", 1, "e1", 60)
    job.balancer.fails = True
    job.update()
    assert job.phase("k") == "failed" and job.manager.updated[-1] == ["e0", "e1", "e2"] and job.threads == []


def test_a_new_engine_that_the_balancer_did_not_take_is_offered_again() -> None:
    job = started(fake_job())
    job.balancer.fails = True
    job.update()
    assert job.phase("k") == "joining"
    job.balancer.fails = False
    job.update()
    assert job.phase("k") == "serving" and "new-1" in job.balancer.engines
    assert job.manager.updated[-1] == ["e0", "e2", "new-1"], "not twice"


def test_a_new_engine_that_ends_before_the_balancer_took_it_may_be_ordered_again() -> None:
    job = started(fake_job())
    job.balancer.fails = True
    job.update()
    assert job.phase("k") == "joining"
    job.balancer.fails = False
    job.cluster.dead.add("new-1")
    job.update()
    assert job.phase("k") == "failed" and job.manager.updated[-1] == ["e0", "e2"]
    job.replacements.order("again", 1, "new-1", 60)
    job.update()
    job.run_threads()
    job.update()
    assert job.phase("again") == "serving" and job.manager.updated[-1] == ["e0", "e2", "new-2"]


def test_an_ended_replica_that_the_balancer_keeps_does_not_keep_the_next_one() -> None:
    job = fake_job(4)
    job.update()
    job.cluster.dead.update({"e1", "e2"})
    job.balancer.refuses = {"e1"}
    job.update()
    assert job.manager.updated[-1] == ["e0", "e1", "e3"] and job.balancer.engines == {"e0", "e1", "e3"}


def test_an_engine_that_does_not_start_is_told_and_may_be_ordered_again() -> None:
    job = fake_job()
    job.update()
    job.replacements.order("k", 1, "e1", 60)
    job.cluster.fails = ValueError("no GPU")
    job.update()
    job.run_threads()
    state = job.replacements.state("k")
    assert state is not None and state["because"] == "the new engine did not start: ValueError: no GPU"
    listed = next(e for e in job.replacements.listing() if e["replica"] == 1)
    assert (listed["instance"], listed["state"], listed["refusal"]) == ("e1", "ended", "")
    assert refused(job, 1, "e0", "again")[1] == "replica 1 is engine e1 by now"
    job.cluster.fails = None
    job.replacements.order("again", 1, "e1", 60)
    job.update()
    job.run_threads()
    job.update()
    assert job.phase("again") == "serving" and set(job.cluster.ended) == {"e1"}


def test_an_engine_that_starts_too_late_is_ended() -> None:
    job = fake_job()
    job.update()
    job.replacements.order("k", 1, "e1", 60)
    job.update()
    job.now.seconds += START_SECONDS + 1
    job.run_threads()
    assert job.phase("k") == "failed" and job.cluster.ended == ["e1", "new-1"]
    job.update()
    assert job.manager.updated[-1] == ["e0", "e2"]


def test_an_engine_that_ended_before_it_had_weights_stays_out() -> None:
    job = started(fake_job())
    job.cluster.dead.add("new-1")
    job.update()
    assert job.phase("k") == "failed" and job.manager.updated[-1] == ["e0", "e2"]


def test_an_update_that_fails_with_the_new_engine_is_tried_without_it() -> None:
    job = started(fake_job())
    job.manager.error = RuntimeError("NCCL")
    job.update()
    job.run_threads()
    state = job.replacements.state("k")
    assert state is not None and state["because"].endswith("failed: RuntimeError: NCCL")
    assert job.cluster.ended == ["e1", "new-1"] and "new-1" not in job.balancer.engines
    job.update()
    assert job.manager.updated[-1] == ["e0", "e2"]


def test_nothing_is_raised_into_the_trainer() -> None:
    job = fake_job()
    job.update()
    job.replacements.order("k", 1, "e1", 60)
    job.manager.remove_replicas = None  # type: ignore[assignment,method-assign]
    job.update()
    assert job.manager.updated[-1] == ["e0", "e1", "e2"]


def test_old_orders_are_forgotten() -> None:
    job = fake_job()
    job.update()
    for n in range(KEPT_MAX + 5):
        job.replacements.order(f"k{n}", 1, "e1", 1)
        job.now.seconds += 2
        job.update()
    assert job.replacements.state("k0") is None
    assert job.replacements.state(f"k{KEPT_MAX + 4}") is not None
