"""Slurm: which job or step is ended, and that nothing is when it is not the one that the plan names."""

import shlex
from typing import Any

import pytest

from rolecall.core.config.actuators import SlurmActuator
from rolecall.core.config.watched import parse_watched
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ConfigError
from rolecall.recovery.actuators.calls import NO_STATUS, NOT_STARTED, Call, CommandCall, Reply
from rolecall.recovery.actuators.targets.slurm import Slurm
from rolecall.recovery.actuators.targets.target import Order
from tests.recovery.actuators.driving import BECAUSE, NOW, TOO_LATE, drive, member, order
from tests.recovery.actuators.slurm_fake import FakeSlurm, Job

A = ActionKind


def slurm(**config: object) -> Slurm:
    return Slurm(SlurmActuator.model_validate({"kind": "slurm", **config}))


@pytest.fixture
def fake() -> FakeSlurm:
    return FakeSlurm(Job(11, ["n-0"]), Job(12, ["n-1"]), Job(13, ["n-1", "n-2"]))


def asked(n: int = 1, **more: Any) -> Order:
    """rollout/1 is Slurm job 12 on n-1, rollout/2 job 13."""
    others = tuple(member(f"rollout/{i}", f"n-{i}", job=f"1{1 + i}.0") for i in range(3) if i != n)
    return order(member(f"rollout/{n}", f"n-{n}", job=f"1{1 + n}.0"), others=others, **more)


def test_the_job_is_requeued(fake: FakeSlurm) -> None:
    start = fake.jobs[12].start
    it = drive(slurm().replace(asked()), fake.reply)
    assert it.done == "Slurm job 12 was requeued" and fake.ended == [("12", start)] and not fake.drained
    assert it.changing == ["scontrol requeue 12", "scontrol update jobid=12 starttime=now"]
    assert all(c.repeatable for c in it.calls if c.changes)


def test_a_job_that_may_not_start_at_once_was_replaced_all_the_same(fake: FakeSlurm) -> None:
    fake.may_start = False
    it = drive(slurm().replace(asked()), fake.reply)
    assert (
        it.done == "Slurm job 12 was requeued, and may start only in two minutes (status 1: Access/permission denied)"
    )
    it = drive(slurm(start_now=False).replace(asked(0)), fake.reply)
    assert it.changing == ["scontrol requeue 11"]


def test_processes_that_register_themselves_tell_job_and_step_apart(fake: FakeSlurm) -> None:
    given = order(member("rollout/1", "n-1", job="12", rendezvous="12.0"))
    assert drive(slurm().replace(given), fake.reply).done


def test_the_node_is_drained_before_the_job_is_requeued_and_once(fake: FakeSlurm) -> None:
    it = drive(slurm(programs="/opt/slurm/bin").replace(asked(leave_node=True)), lambda c: fake.reply(_plain(c)))
    assert it.done == "Slurm job 12 was requeued; n-1 drains" and fake.drained == ["n-1"]
    assert it.changing == [
        "/opt/slurm/bin/scontrol update nodename=n-1 state=drain " + shlex.quote(f"reason=rolecall inc-1-x: {BECAUSE}"),
        "/opt/slurm/bin/scontrol requeue 12",
        "/opt/slurm/bin/scontrol update jobid=12 starttime=now",
    ]
    fake.jobs[12].start, fake.jobs[12].state = int(NOW) - 60, "RUNNING"
    it = drive(slurm().replace(asked(leave_node=True)), fake.reply)
    assert it.done == "Slurm job 12 was requeued; n-1 was mixed+drain already" and fake.drained == ["n-1"]


def test_a_node_is_drained_under_slurms_own_name() -> None:
    """Agents have names without capitals."""
    fake = FakeSlurm(Job(13, ["GPU-1"]))
    it = drive(slurm().replace(order(member("rollout/1", "gpu-1", job="13.0"), leave_node=True)), fake.reply)
    assert it.done == "Slurm job 13 was requeued; GPU-1 drains" and fake.drained == ["GPU-1"]
    fake = FakeSlurm(Job(13, ["GPU-1", "gpu-1"]))
    it = drive(slurm().replace(order(member("rollout/1", "gpu-1", job="13.0"))), fake.reply)
    assert "cannot be told apart" in it.error and not fake.ended


def _plain(call: Call) -> Call:
    """With the program's name alone."""
    assert isinstance(call, CommandCall)
    argv = (call.argv[0].rpartition("/")[2], *call.argv[1:])
    return CommandCall(key=call.key, words="", argv=argv, environment=call.environment)


def test_a_job_of_an_array_is_requeued_alone() -> None:
    """The number of the array is that of one of its jobs, too."""
    fake = FakeSlurm(Job(12, ["n-1"], array=(12, 3)), Job(11, ["n-0"], array=(12, 2)))
    it = drive(slurm().replace(asked()), fake.reply)
    assert it.done == "Slurm job 12_3 was requeued" and [name for name, _ in fake.ended] == ["12_3"]


def test_the_name_of_a_job_changes_nothing() -> None:
    fake = FakeSlurm(Job(12, ["n-1"], name="x ArrayJobId=99 ArrayTaskId=1 HetJobId=3 JobState=FAILED Restarts=5"))
    assert drive(slurm().replace(asked()), fake.reply).changing[0] == "scontrol requeue 12"


def test_a_step_is_ended_and_its_job_goes_on(fake: FakeSlurm) -> None:
    fake.jobs[12].steps = {4: int(NOW) - 9, 5: int(NOW) - 9}
    given = order(
        member("rollout/1", "n-1", job="12.4"),
        others=(member("rollout/2", "n-1", job="12.5"), member("rollout/3", "n-1", job="12.4")),
    )
    target = slurm(unit="step")
    it = drive(target.replace(given), fake.reply)
    assert it.done == "Slurm step 12.4 has ended" and it.changing == ["scancel 12.4"]
    assert target.supports == {A.REPLACE_REPLICA} and target.also_hit(given) == ["rollout/3"]


@pytest.mark.parametrize(
    ("config", "hit"),
    [
        ({}, ["rollout/2", "rollout/3", "rollout/5"]),
        ({"unit": "step"}, ["rollout/3", "rollout/5"]),
        ({"job": "{job}"}, []),
    ],
)
def test_which_other_replicas_end_too(config: dict[str, object], hit: list[str]) -> None:
    others = (
        member("rollout/2", "n-1", job="12.5"),
        member("rollout/3", "n-1", job="12.4"),
        member("rollout/4", "n-1", job="13.4"),
        member("rollout/5", "n-1", job="elsewhere:29500"),
    )
    assert slurm(**config).also_hit(order(member("rollout/1", "n-1", job="12.4"), others=others)) == hit


def test_without_drain_such_faults_are_not_supported() -> None:
    assert slurm().supports == {A.REPLACE_REPLICA, A.REPLACE_NODE}
    assert slurm(drain=False).supports == {A.REPLACE_REPLICA}


@pytest.mark.parametrize("unit", ["job", "step"])
def test_a_later_run_under_the_same_number_is_left_alone(fake: FakeSlurm, unit: str) -> None:
    fake.start_again(fake.jobs[12])
    it = drive(slurm(unit=unit).replace(asked(leave_node=unit == "job")), fake.reply)
    assert "started after rank 0 of rollout/1#2" in it.error and not it.changing
    it = drive(slurm(unit=unit).replace(asked(begun=True)), fake.reply)
    assert it.done.startswith("rollout/1#2 has ended: ") and not it.changing, "after a takeover"


@pytest.mark.parametrize("unit", ["job", "step"])
def test_a_run_that_begins_while_it_is_read_is_left_alone(fake: FakeSlurm, unit: str) -> None:
    def answer(call: Call) -> Reply:
        if call.key == "nodes":
            fake.start_again(fake.jobs[12])
        return fake.reply(call)

    it = drive(slurm(unit=unit).replace(asked()), answer)
    assert "changed meanwhile" in it.error and not it.changing


@pytest.mark.parametrize(
    ("job", "error"),
    [
        (Job(12, ["n-1"], state="COMPLETING"), "does not run: completing"),
        (Job(12, ["n-1"], state="PENDING"), "does not run: pending"),
        (Job(12, ["n-2"]), "does not run on n-1, as rollout/1 does, but on n-2"),
        (Job(12, ["n-1"], requeue=0), "may not be requeued"),
        (Job(12, ["n-1"], batch=0), "no batch job"),
        (Job(12, ["n-1"], het=True), "heterogeneous"),
        (Job(99, ["n-1"]), "no Slurm job 12 any more"),
    ],
)
def test_another_job_stays(job: Job, error: str) -> None:
    it = drive(slurm().replace(asked(leave_node=True)), FakeSlurm(job).reply)
    assert error in it.error and not it.changing, it


@pytest.mark.parametrize(
    ("config", "who", "error"),
    [
        ({}, {"job": "77"}, "only of 77: not started by srun?"),
        ({}, {"job": ""}, "of no job"),
        ({}, {"job": "host:29500"}, "only of host:29500"),
        ({"job": "{job}"}, {"job": "12; scancel 3"}, "not started by srun?"),
        ({}, {"job": "12.0", "at": 0.0}, "not known since when"),
        ({"unit": "step", "job": "{job}"}, {"job": "12"}, "not one step"),
    ],
)
def test_processes_whose_job_is_not_known_stay(
    fake: FakeSlurm, config: dict[str, object], who: dict[str, Any], error: str
) -> None:
    it = drive(slurm(**config).replace(order(member("rollout/1", "n-1", **who))), fake.reply)
    assert error in it.error and not it.changing


def test_torchrun_may_carry_the_number_of_its_job(fake: FakeSlurm) -> None:
    given = order(member("rollout/1", "n-1", job="12", rendezvous="n-1:29500"))
    assert drive(slurm(job="{job}").replace(given), fake.reply).changing[0] == "scontrol requeue 12"


@pytest.mark.parametrize(("step", "job"), [("12.0", "13.0"), ("12.batch", "13"), ("12.extern", "")])
def test_the_cgroup_of_a_process_tells_its_job(fake: FakeSlurm, step: str, job: str) -> None:
    given = order(member("rollout/1", "n-1", slurm_step=step, job=job))
    assert drive(slurm(job="{job}").replace(given), fake.reply).changing[0] == "scontrol requeue 12"


def test_a_replica_in_several_jobs_stays(fake: FakeSlurm) -> None:
    given = order(member("rollout/1", "n-1", job="12.0"), member("rollout/1", "n-1", rank=1, job="13.0"))
    assert "several Slurm jobs: 12, 13" in drive(slurm().replace(given), fake.reply).error


@pytest.mark.parametrize("node", ["ALL", "n-[0-9]", "n-2"])
def test_no_other_node_is_drained(node: str) -> None:
    """Slurm reads `ALL` and lists where it takes a node."""
    fake = FakeSlurm(Job(13, [node, "n-1"]))
    given = order(member("rollout/1", "n-1", job="13.0"), leave_node=True)
    given = Order(**{f: getattr(given, f) for f in given.__slots__} | {"node": node})
    it = drive(slurm().replace(given), fake.reply)
    assert f"{node} is no node of rollout/1" in it.error and not it.changing


@pytest.mark.parametrize("key", ["read", "nodes", "node", "again"])
@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=1, text="slurm_load_jobs error: Unable to contact slurm controller (connect failure)"),
        Reply(status=NO_STATUS, text="not done within 30 s, and ended"),
        Reply(status=NOT_STARTED, text="scontrol: No such file or directory"),
        Reply(status=0, text=""),
    ],
)
def test_what_cannot_be_read_is_not_changed(fake: FakeSlurm, key: str, reply: Reply) -> None:
    it = drive(
        slurm().replace(asked(leave_node=True)),
        lambda c: reply if c.key.rpartition("-")[0] == key or c.key == key else fake.reply(c),
    )
    assert it.error and not fake.ended, it


def test_a_refusal_to_drain_ends_nothing(fake: FakeSlurm) -> None:
    denied = Reply(status=1, text="slurm_update error: Invalid user id")
    it = drive(slurm().replace(asked(leave_node=True)), lambda c: denied if c.key == "drain" else fake.reply(c))
    assert (
        it.error
        == "Slurm node n-1 was not drained, and nothing was ended: status 1: slurm_update error: Invalid user id"
    )
    assert not fake.ended


def test_a_refusal_to_requeue_says_what_was_done_before(fake: FakeSlurm) -> None:
    denied = Reply(status=1, text="Access/permission denied for job 12")
    it = drive(slurm().replace(asked(leave_node=True)), lambda c: denied if c.key == "requeue" else fake.reply(c))
    assert it.error.startswith("Slurm job 12 was not requeued: status 1: Access") and it.error.endswith("; n-1 drains")


def test_a_job_that_does_not_end_in_time_says_what_was_done_before(fake: FakeSlurm) -> None:
    it = drive(slurm().replace(asked(leave_node=True)), fake.reply, give_up="ended")
    assert it.error == f"{TOO_LATE}; n-1 drains" and len(fake.ended) == 1


def test_a_drained_node_has_ended_nothing(fake: FakeSlurm) -> None:
    it = drive(slurm().replace(asked(leave_node=True)), fake.reply)
    assert [c.prepares for c in it.calls if c.changes] == [True, False, False]


def test_a_controller_that_does_not_answer_afterwards_is_asked_until_the_deadline(fake: FakeSlurm) -> None:
    silent = [Reply(status=1, text="Unable to contact slurm controller")] * 3
    it = drive(
        slurm().replace(asked()), lambda c: silent.pop() if c.key.startswith("ended") and silent else fake.reply(c)
    )
    assert it.done == "Slurm job 12 was requeued"


def test_a_job_that_ends_otherwise_was_not_replaced(fake: FakeSlurm) -> None:
    def answer(call: Call) -> Reply:
        if call.key == "requeue":
            fake.jobs[12].state = "CANCELLED"
            return Reply(status=NO_STATUS)
        return fake.reply(call)

    assert drive(slurm().replace(asked()), answer).error == "Slurm job 12 has ended, and was not requeued"


def test_without_a_process_nothing_is_called() -> None:
    assert "no process of rollout/1#2 is seen" in drive(slurm().replace(order()), FakeSlurm().reply).error
    assert drive(slurm().replace(order(begun=True)), FakeSlurm().reply).done == "rollout/1#2 has ended"


@pytest.mark.parametrize(
    ("config", "problem"), [({"unit": "node"}, "unit"), ({"job": "{pid}"}, r"\{pid\} is not known here")]
)
def test_mistakes_are_named(config: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_watched({"actuator": {"kind": "slurm", **config}}, "watch.yaml")


def test_what_has_no_job_is_in_none_where_cgroups_tell_it() -> None:
    """A trainer of torchrun in the same batch script has no number of a step in its environment."""
    trainer = member("trainer/0", "n-1", job="host:29500")
    mine = member("rollout/1", "n-1", job="12.4")
    assert slurm().also_hit(order(mine, others=(trainer,))) == ["trainer/0"]
    assert slurm().also_hit(order(member("rollout/1", "n-1", slurm_step="12.4"), others=(trainer,))) == []


def test_a_job_that_may_hold_others_on_its_further_nodes_stays(fake: FakeSlurm) -> None:
    """Job 13 runs on n-1 and n-2."""
    trainer = member("trainer/0", "n-2", job="host:29500")
    given = order(member("rollout/2", "n-1", job="13.0"), others=(trainer,))
    it = drive(slurm().replace(given), fake.reply)
    assert "Slurm job 13 may hold trainer/0, too, whose Slurm job is not known" in it.error and not it.changing
    elsewhere = order(member("rollout/2", "n-1", job="13.0"), others=(member("trainer/0", "n-0", job="host:29500"),))
    assert drive(slurm().replace(elsewhere), fake.reply).done
