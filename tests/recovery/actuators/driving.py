"""Runs the procedure of a target against an answer, without a journal, a thread or a wait."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rolecall.core.errors import ActuatorError
from rolecall.recovery.actuators.calls import Call, Procedure, Reply
from rolecall.recovery.actuators.targets.target import Member, Order

CALLS_MAX = 200
BECAUSE = "it hangs in 'generate'"
TOO_LATE = "not done within 300 s"
NOW = 1_800_000_000.0
"""Wall seconds at which the processes of `member` were first seen."""


@dataclass
class Driven:
    """`done`, or `error`; both empty: it asked for more calls than an actuator makes, and would end at a deadline."""

    calls: list[Call] = field(default_factory=list)
    done: str = ""
    error: str = ""

    @property
    def changing(self) -> list[str]:
        return [c.shown for c in self.calls if c.changes]


def drive(procedure: Procedure, answer: Callable[[Call], Reply], give_up: str = "") -> Driven:
    """`give_up`: beginning of the key of the call at which it is given up."""
    it = Driven()
    reply: Reply | None = None
    try:
        while len(it.calls) < CALLS_MAX:
            call = next(procedure) if reply is None else procedure.send(reply)
            assert call.key not in {c.key for c in it.calls}, f"two calls have the key {call.key}"
            while give_up and call.key.startswith(give_up):
                procedure.throw(ActuatorError(TOO_LATE))
            it.calls.append(call)
            reply = answer(call)
    except StopIteration as e:
        it.done = e.value
        assert it.done, "it says what was done"
    except ActuatorError as e:
        it.error = str(e)
        assert it.error, "it says why"
    return it


def member(
    replica: str,
    node: str,
    *,
    rank: int = 0,
    pid: int = 40,
    job: str = "",
    rendezvous: str = "",
    at: float = NOW,
    pod_uid: str = "",
    slurm_step: str = "",
) -> Member:
    return Member(
        replica=replica,
        rank=rank,
        node=node,
        pid=pid,
        start_ticks=9,
        job=job,
        rendezvous=rendezvous,
        registered_at=at,
        pod_uid=pod_uid,
        slurm_step=slurm_step,
    )


def order(*members: Member, others: tuple[Member, ...] = (), leave_node: bool = False, begun: bool = False) -> Order:
    return Order(
        key="d:rollout/1",
        incident_id="inc-1-x",
        replica=members[0].replica if members else "rollout/1",
        incarnation=2,
        node=members[0].node if members else "n-1",
        because=BECAUSE,
        members=members,
        others=others,
        leave_node=leave_node,
        begun=begun,
    )
