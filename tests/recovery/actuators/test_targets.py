"""Targets of frameworks, driven by replies: what they call, and what they leave alone."""

from collections.abc import Sequence

import pytest

from rolecall.core.config.actuators import MilesActuator, ProcessesActuator, TorchftActuator
from rolecall.core.errors import ActuatorError
from rolecall.recovery.actuators.calls import NO_STATUS, NOT_SENT, Call, Reply
from rolecall.recovery.actuators.external import calls_of
from rolecall.recovery.actuators.targets.miles import TRIES_MAX as MILES_TRIES
from rolecall.recovery.actuators.targets.miles import Miles
from rolecall.recovery.actuators.targets.processes import Processes
from rolecall.recovery.actuators.targets.target import Member, Order, Target
from rolecall.recovery.actuators.targets.torchft import Torchft

URL = "http://head:1"


def order(replica: str = "rollout/1", *, num_members: int = 2, begun: bool = False) -> Order:
    members = tuple(
        Member(replica=replica, rank=n, node=f"n-{n}", pid=40 + n, start_ticks=9 + n) for n in range(num_members)
    )
    return Order(
        key="k", incident_id="i", replica=replica, incarnation=2, node="n-0", because="", members=members, begun=begun
    )


def drive(target: Target, given: Order, *replies: Reply) -> tuple[list[str], str]:
    """The calls, in order, and how it ends. Every reply must be used."""
    made: list[Call] = []
    procedure, left = target.replace(given), list(replies)
    try:
        made.append(next(procedure))
        while True:
            made.append(procedure.send(left.pop(0)))
    except StopIteration as e:
        ends = str(e.value)
    except ActuatorError as e:
        ends = f"refused: {e}"
    assert not left, "a reply too many"
    return [call.shown for call in made], ends


def ok(text: str = "") -> Reply:
    return Reply(status=200, text=text)


# --- processes --------------------------------------------------------------------------------------------------------


def processes(**config: object) -> Processes:
    return Processes(ProcessesActuator.model_validate({"kind": "processes", **config}))


def test_every_rank_is_ended_on_its_node_by_pid_and_start_time() -> None:
    target = processes(run_on_node=["ssh", "{node}"], grace_seconds=2)
    calls, ends = drive(target, order(), Reply(status=0), Reply(status=0))
    assert calls == [
        "ssh n-0 rolecall node end 40 --start-ticks 9 --grace 2",
        "ssh n-1 rolecall node end 41 --start-ticks 10 --grace 2",
    ]
    assert ends == "ended 2 processes of rollout/1#2"


def test_one_that_does_not_end_is_the_end() -> None:
    calls, ends = drive(processes(), order(num_members=1), Reply(status=2, text="did not end"))
    assert calls == ["rolecall node end 40 --start-ticks 9"]
    assert ends == "refused: pid 40 on n-0: status 2: did not end"


def test_a_pid_of_another_node_is_not_looked_for_here() -> None:
    assert drive(processes(), order()) == (
        [],
        "refused: the job runs on n-0, n-1: actuator.run_on_node must say how to reach a node",
    )


def test_only_what_is_seen_is_ended() -> None:
    assert "no process of rollout/1#2 is seen" in drive(processes(), order(num_members=0))[1]
    assert drive(processes(), order(num_members=0, begun=True)) == ([], "rollout/1#2 has ended")


# --- miles ------------------------------------------------------------------------------------------------------------

MILES = Miles(MilesActuator(kind="miles", url=URL + "/"))
CELL = f"{URL}/api/v1/cells/rollout-1"


def cell(suspend: bool, phase: str) -> Reply:
    return ok(f'{{"spec": {{"suspend": {str(suspend).lower()}}}, "status": {{"phase": "{phase}"}}}}')


def test_a_cell_is_suspended_and_resumed_once_it_is() -> None:
    waiting = cell(True, "Running")
    calls, ends = drive(MILES, order(), cell(False, "Running"), ok(), waiting, waiting, cell(True, "Suspended"), ok())
    assert calls == [
        f"GET {CELL}",
        f'PATCH {CELL} {{"spec": {{"suspend": true}}}}',
        *[f"GET {CELL}"] * 3,
        f'PATCH {CELL} {{"spec": {{"suspend": false}}}}',
    ]
    assert ends == "cell rollout-1 was suspended and resumed"


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        ([Reply(status=404, text="not found")], "cell rollout-1: status 404: not found"),
        ([Reply(status=-1, text="no whole answer")], "no whole answer"),
        ([ok("<html>")], "cell rollout-1: status 200: <html>"),
        ([ok("{}")], "without spec.suspend or status.phase"),
        ([cell(True, "Suspended")], "somebody else is at work on it"),
        ([cell(True, "Running")], "somebody else is at work on it"),
        ([cell(False, "Running"), Reply(status=409, text="busy")], "suspend cell rollout-1: status 409: busy"),
        ([cell(False, "Running"), *[Reply(status=500, text="broken")] * 4], "cell rollout-1: status 500: broken; look"),
        ([cell(False, "Running"), ok(), Reply(status=404)], "cell rollout-1: status 404; look whether"),
        ([cell(False, "Running"), ok(), cell(True, "Suspended"), Reply(status=403)], "resume it by hand"),
        ([cell(False, "Running"), ok(), cell(True, "Suspended"), *[Reply(status=500)] * 4], "resume it by hand"),
    ],
)
def test_whatever_is_not_as_expected_ends_it(replies: Sequence[Reply], why: str) -> None:
    assert why in drive(MILES, order(), *replies)[1]


def test_a_watch_that_takes_over_finds_the_cell_suspended_by_its_predecessor() -> None:
    suspended = cell(True, "Suspended")
    assert drive(MILES, order(begun=True), suspended, ok(), suspended, ok())[1].endswith("suspended and resumed")


@pytest.mark.parametrize("reply", [Reply(status=503), Reply(status=-1, text="no whole answer"), Reply(status=NOT_SENT)])
def test_a_control_server_that_cannot_answer_now_leaves_no_cell_suspended(reply: Reply) -> None:
    calls, ends = drive(
        MILES, order(), cell(False, "Running"), reply, ok(), reply, cell(True, "Suspended"), reply, ok()
    )
    assert ends == "cell rollout-1 was suspended and resumed"
    assert [c.rpartition(" ")[2] for c in calls if c.startswith("PATCH")] == ["true}}"] * 2 + ["false}}"] * 2


def test_a_control_server_that_was_never_reached_has_suspended_nothing() -> None:
    unsent = Reply(status=NOT_SENT, text="connection refused")
    _, ends = drive(MILES, order(), cell(False, "Running"), *[unsent] * MILES_TRIES)
    assert ends == "refused: suspend cell rollout-1: not sent: connection refused"
    _, ends = drive(MILES, order(), cell(False, "Running"), Reply(status=NO_STATUS), *[unsent] * (MILES_TRIES - 1))
    assert ends.endswith("look whether cell rollout-1 is suspended, and resume it by hand")


def test_a_watch_that_takes_over_after_the_last_call_finds_the_cell_resumed() -> None:
    """Its predecessor died before it wrote how the action ended."""
    running = cell(False, "Running")
    assert drive(MILES, order(begun=True), running, ok(), running, ok())[1].endswith("suspended and resumed")


def test_a_cell_that_takes_long_is_asked_less_often() -> None:
    procedure, waits = MILES.replace(order()), list[float]()
    next(procedure)
    call = procedure.send(cell(False, "Running"))
    reply = ok()
    for _ in range(150):
        call = procedure.send(reply)
        waits.append(call.after_seconds)
        reply = cell(True, "Running")
    assert waits[0] == 1.0 and waits[-1] == 5.0 and sum(waits) > 300.0, "a deadline of 300 s needs less than 200 calls"


def test_roles_without_a_cell_are_refused() -> None:
    assert drive(MILES, order("critic/0")) == ([], "refused: critic/0: there is no cell of a critic")


# --- torchft ----------------------------------------------------------------------------------------------------------

TORCHFT = Torchft(TorchftActuator(kind="torchft", url=URL, groups={"trainer": "ddp_{index}"}))
IDS = [f"ddp_{n}:{n:02d}345678-1234-1234-1234-123456789abc" for n in (1, 10, 2)]
PAGE = ok("".join(f"<b>{one}</b> <form action='/replica/{one}/kill'>" for one in IDS))


def test_the_group_with_that_name_is_asked_to_end_and_no_other() -> None:
    calls, ends = drive(TORCHFT, order("trainer/1"), PAGE, Reply(status=500, text="transport error"))
    assert calls == [f"GET {URL}/status", f"POST {URL}/replica/{IDS[0].replace(':', '%3A')}/kill"]
    assert ends == f"the lighthouse asked {IDS[0]} to end"
    assert drive(TORCHFT, order("trainer/10"), PAGE, ok())[1] == f"the lighthouse asked {IDS[1]} to end"


def test_a_request_that_was_not_sent_is_sent_again_and_one_without_an_answer_is_not() -> None:
    unsent, silent = Reply(status=NOT_SENT, text="connection refused"), Reply(status=NO_STATUS, text="late")
    calls, ends = drive(TORCHFT, order("trainer/1"), PAGE, unsent, unsent, ok())
    assert len(calls) == 4 and ends == f"the lighthouse asked {IDS[0]} to end"
    calls, ends = drive(TORCHFT, order("trainer/1"), PAGE, *[unsent] * 4)
    assert len(calls) == 5 and ends == f"refused: end replica group {IDS[0]}: not sent: connection refused"
    calls, ends = drive(TORCHFT, order("trainer/1"), PAGE, silent)
    assert len(calls) == 2 and ends == f"refused: end replica group {IDS[0]}: no answer: late"


def test_a_group_that_has_left_the_quorum_is_ended_by_its_processes() -> None:
    config = TorchftActuator(
        kind="torchft", url=URL, groups={"trainer": "ddp_{index}"}, processes=ProcessesActuator(kind="processes")
    )
    calls, ends = drive(Torchft(config), order("trainer/3", num_members=1), PAGE, Reply(status=0))
    assert calls == [f"GET {URL}/status", "rolecall node end 40 --start-ticks 9"]
    assert ends == "ended 1 process of trainer/3#2"


def test_a_group_that_leaves_the_quorum_after_the_look_is_ended_by_its_processes() -> None:
    config = TorchftActuator(
        kind="torchft", url=URL, groups={"trainer": "ddp_{index}"}, processes=ProcessesActuator(kind="processes")
    )
    gone = Reply(status=500, text="Something went wrong: failed to find replica")
    calls, ends = drive(Torchft(config), order("trainer/1", num_members=1), PAGE, gone, Reply(status=0))
    assert calls[-1] == "rolecall node end 40 --start-ticks 9" and ends == "ended 1 process of trainer/1#2"


@pytest.mark.parametrize(
    ("replica", "replies", "why"),
    [
        ("trainer/3", [PAGE], "the quorum has 0 replica groups ddp_3"),
        (
            "trainer/1",
            [ok(PAGE.text + IDS[0].replace("1234", "9999"))],
            "the quorum has 2 replica groups ddp_1: ddp_1:",
        ),
        ("trainer/1", [Reply(status=-1, text="refused")], "refused"),
        ("trainer/1", [PAGE, Reply(status=500, text="failed to find replica")], "failed to find replica"),
        ("trainer/1", [PAGE, Reply(status=-1, text="no whole answer within 10 s")], "no whole answer within 10 s"),
        ("rollout/1", [], "there is no replica group of a rollout"),
    ],
)
def test_a_group_that_is_not_clearly_there_is_left_alone(replica: str, replies: Sequence[Reply], why: str) -> None:
    assert why in drive(TORCHFT, order(replica), *replies)[1]


def test_a_dry_run_shows_both_changes_of_a_cell_and_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(call: Call) -> Reply:
        asked.append(call.shown)
        return cell(False, "Running")

    monkeypatch.setattr("rolecall.recovery.actuators.external._made", answer)
    calls, ends = calls_of(MILES, order())
    assert [c.words for c in calls] == ["suspend cell rollout-1", "resume cell rollout-1"]
    assert asked == [f"GET {CELL}"] and ends.endswith("suspended and resumed")
