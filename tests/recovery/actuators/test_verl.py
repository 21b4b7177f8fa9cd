"""verl, driven by replies: what is ordered, what is left alone, and what is said when the job does not answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.actuators import VerlActuator
from rolecall.core.config.watched import parse_watched
from rolecall.core.errors import ActuatorError, ConfigError
from rolecall.recovery.actuators.calls import NO_STATUS, NOT_SENT, Call, Reply
from rolecall.recovery.actuators.external import calls_of
from rolecall.recovery.actuators.targets.choice import target_of
from rolecall.recovery.actuators.targets.target import Member, Order
from rolecall.recovery.actuators.targets.verl import CONSTRUCTED_SECONDS, ENDED_LOOKS_MAX, LOOKS_MAX, Verl
from tests.recovery.actuators.driving import NOW, drive, member, order

URL = "http://head:9479"
OPS = f"{URL}/v1/replacements/d%3Arollout%2F1"
READ = f"GET {URL}/v1/replicas"
PUT = f'PUT {OPS} {{"instance": "e1", "replica": 1, "within_seconds": 240.0}}'


def verl(**config: object) -> Verl:
    return Verl(VerlActuator.model_validate({"kind": "verl", "url": URL, "token_path": "/token", **config}))


def process(
    pid: int = 40,
    *names: str,
    server: bool = True,
    alive: bool = True,
    started_at: float = NOW - 60,
    host: str = "10.0.0.1",
) -> dict[str, Any]:
    """`names`: of its host; none: as a plugin that does not tell them."""
    found = {"pid": pid, "host": host, "started_at": started_at, "alive": alive, "server": server}
    return {**found, "names": list(names)} if names else found


def entry(replica: int = 1, *processes: dict[str, Any], **fields: object) -> dict[str, Any]:
    found = list(processes) or [process(40 if replica == 1 else 90 + replica)]
    base = {"replica": replica, "mode": "standalone", "instance": f"e{replica}", "state": "serving", "refusal": ""}
    return {**base, "processes": found, **fields}


def ok(body: object) -> Reply:
    return Reply(status=200, text=json.dumps(body))


def listing(*entries: dict[str, Any]) -> Reply:
    return ok({"process": {"host": "head", "pid": 1}, "replicas": [entry(0), *(entries or (entry(),)), entry(2)]})


def phase(name: str, because: str = "why") -> Reply:
    return ok({"key": "k", "replica": 1, "phase": name, "because": because})


def refused(status: int, error: str) -> Reply:
    return Reply(status=status, text=json.dumps({"error": error}))


def run(given: Order, *replies: Reply, target: Verl | None = None) -> tuple[list[str], str]:
    """The calls, and how it ends. Every reply is used."""
    left = list(replies)

    def answer(call: Call) -> Reply:
        return left.pop(0)

    it = drive((target or verl()).replace(given), answer)
    assert not left, "a reply too many"
    return [c.shown for c in it.calls], it.done or f"refused: {it.error}"


ONE = order(member("rollout/1", "n-1"))


def test_the_engine_that_holds_the_processes_is_ordered_and_waited_for() -> None:
    calls, ends = run(
        ONE, listing(), phase("waiting"), *(phase(p) for p in ("waiting", "starting", "started", "joining")),
        phase("serving", "it serves"),
    )  # fmt: skip
    assert calls == [READ, PUT, *[f"GET {OPS}"] * 5]
    assert ends == "rollout/1: it serves"


def test_a_dry_run_reads_and_prints_the_order(tmp_path: Path) -> None:
    it = drive(verl().replace(ONE), lambda c: c.assumed or (c.success if c.changes else listing()))
    assert it.changing == [PUT] and it.done.startswith("rollout/1: ")
    token = tmp_path / "token"
    token.write_text("secret")
    with pytest.raises(ActuatorError, match="connection refused"):
        calls_of(Verl(VerlActuator(kind="verl", url="http://127.0.0.1:9", token_path=str(token))), ONE)


@pytest.mark.parametrize(
    ("given", "found", "why"),
    [
        (ONE, entry(refusal="it shares its devices with the trainer"), "it shares its devices with the trainer"),
        (ONE, entry(state="replacing"), "is being replaced by somebody else"),
        (ONE, entry(1, process(41)), "pid 40 of rollout/1#2 is no process of the job's replica 1 (41)"),
        (ONE, entry(1, process(40, started_at=NOW + CONSTRUCTED_SECONDS + 1)), "started after rollout/1#2"),
        (
            ONE,
            entry(1, process(40, "n-2", "n-2.example")),
            "is on n-1, and the job's replica 1 has this pid on another",
        ),
        (order(member("rollout/1", "n-1.a")), entry(1, process(40, "n-1.b")), "is on n-1.a, and"),
        (ONE, entry(1, process(40, "n-12")), "give its agent one of these names (`node`)"),
        (
            ONE,
            entry(1, process(40, "n-1", started_at=NOW + CONSTRUCTED_SECONDS + 1), process(40, "n-2")),
            "started after rollout/1#2",
        ),
        (ONE, entry(state="ended", processes=[]), "is no process of the job's replica 1 (none)"),
        (order(member("trainer/1", "n-1")), entry(), "there is no replica of verl for a trainer"),
    ],
)
def test_what_is_not_meant_is_left_alone(given: Order, found: dict[str, Any], why: str) -> None:
    calls, ends = run(given, *([] if given.role == "trainer" else [listing(found)]))
    assert ends.startswith("refused: ") and why in ends
    assert all(call == READ for call in calls)


def test_a_crash_that_ray_has_not_noticed_is_read_again() -> None:
    dead = listing(entry(1, process(alive=False)))
    calls, ends = run(order(), listing(), listing(), dead, phase("waiting"), phase("serving"))
    assert calls == [READ, READ, READ, PUT, f"GET {OPS}"] and ends == "rollout/1: why"
    calls, ends = run(order(), *[listing()] * (ENDED_LOOKS_MAX + 1))
    assert set(calls) == {READ}
    assert ends == "refused: no process of rollout/1#2 is seen, and the job's replica 1 runs"


@pytest.mark.parametrize(
    ("members", "processes"),
    [
        ((), (process(alive=False),)),  # the server crashed
        ((), (process(), process(41, alive=False))),  # one of two nodes
        ((member("rollout/1", "n-1"),), (process(alive=False),)),  # Ray knows before its process is gone
        ((member("rollout/1", "n-1", pid=44),), (process(), process(44, server=False))),  # seen by its worker
        ((member("rollout/1", "n-1", at=0),), (process(started_at=NOW + 9999),)),  # since when is not known
        ((member("rollout/1", "n-1"),), (process(40, "N-1.example"),)),  # named with its domain
        ((member("rollout/1", "n-1.example"),), (process(40, "n-1"),)),
        ((member("rollout/1", "10.0.0.1"),), (process(40, "worker"),)),  # named by its address
        # Two hosts, of one replica, have the same PID.
        (
            (member("rollout/1", "n-1"),),
            (process(40, "n-2", host="10.0.0.2", started_at=NOW + 9999), process(40, "n-1")),
        ),
    ],
)
def test_what_is_meant_is_ordered(members: Sequence[Member], processes: Sequence[dict[str, Any]]) -> None:
    calls, ends = run(order(*members), listing(entry(1, *processes)), phase("waiting"), phase("serving"))
    assert calls[1] == PUT and ends == "rollout/1: why"


def test_a_replica_whose_replacement_failed_is_ordered_again() -> None:
    ended = entry(1, process(alive=False), state="ended")
    calls, ends = run(order(), listing(ended), phase("waiting"), phase("serving"))
    assert calls[1] == PUT and ends == "rollout/1: why"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(status=500, text="oops"), "status 500: oops"),
        (refused(403, "the token cannot be read"), "status 403: the token cannot be read"),
        (Reply(status=NO_STATUS, text="no whole answer"), "no answer: no whole answer"),
        (Reply(status=200, text="<html>"), "what answers is not rolecall's plugin"),
        (ok({"replicas": [{"replica": 1}]}), "what answers is not rolecall's plugin"),
        (
            ok({"replicas": [entry(1, {**process(), "names": ["n-1", 7]})]}),
            "what answers is not rolecall's plugin",
        ),
        (ok({"replicas": "x"}), "what answers is not rolecall's plugin"),
        (ok({"replicas": []}), "the job has 0 replicas 1, of none"),
        (ok({"replicas": [entry(), entry()]}), "the job has 2 replicas 1, of 1, 1"),
    ],
)
def test_a_list_that_cannot_be_read_is_the_end(reply: Reply, why: str) -> None:
    calls, ends = run(ONE, reply)
    assert calls == [READ] and why in ends and ends.startswith("refused")


def test_an_order_without_an_answer_is_sent_again_and_is_the_same() -> None:
    nothing, busy = Reply(status=NO_STATUS, text="late"), Reply(status=503)
    calls, ends = run(ONE, listing(), nothing, busy, phase("starting"), phase("serving"))
    assert calls == [READ, PUT, PUT, PUT, f"GET {OPS}"] and ends == "rollout/1: why"
    calls, ends = run(ONE, listing(), *[nothing] * 4)
    assert calls == [READ, PUT, PUT, PUT, PUT]
    assert "no answer: late; if the order arrived, rollout/1 is replaced at the next weight update" in ends
    unsent = Reply(status=NOT_SENT, text="connection refused")
    assert run(ONE, listing(), *[unsent] * 4)[1].endswith("rollout/1: not sent: connection refused")
    assert "if the order arrived" in run(ONE, listing(), nothing, *[unsent] * 3)[1]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409])
def test_an_order_that_is_refused_is_the_end(status: int) -> None:
    calls, ends = run(ONE, listing(), refused(status, "one at a time"))
    assert calls == [READ, PUT]
    assert ends == f"refused: order the replacement of rollout/1: status {status}: one at a time"


def test_how_it_fails_in_the_job_is_said() -> None:
    assert run(ONE, listing(), phase("waiting"), phase("failed", "no weight update began"))[1] == (
        "refused: rollout/1: no weight update began"
    )
    assert "started again?" in run(ONE, listing(), phase("waiting"), refused(404, "no"))[1]
    assert "how far the replacement is: status 200: {}" in run(ONE, listing(), phase("waiting"), ok({}))[1]


def test_a_job_that_cannot_answer_now_is_asked_again() -> None:
    away = [Reply(status=NOT_SENT), Reply(status=500), Reply(status=NO_STATUS)]
    assert run(ONE, listing(), phase("waiting"), *away, phase("serving"))[1] == "rollout/1: why"
    calls, ends = run(ONE, listing(), phase("waiting"), *[Reply(status=500)] * LOOKS_MAX)
    assert f"not done after {LOOKS_MAX} looks" in ends and len(calls) < 200


def test_after_a_takeover_the_order_is_looked_for_first() -> None:
    again = order(member("rollout/1", "n-1"), begun=True)
    assert run(again, phase("starting"), phase("serving")) == ([f"GET {OPS}"] * 2, "rollout/1: why")
    calls, _ = run(again, refused(404, "no"), listing(), phase("waiting"), phase("serving"))
    assert calls == [f"GET {OPS}", READ, PUT, f"GET {OPS}"]
    calls, ends = run(again, Reply(status=500), phase("serving"))
    assert calls == [f"GET {OPS}"] * 2 and ends == "rollout/1: why", "it is never ordered blindly"


def test_looks_become_rarer() -> None:
    made: list[Call] = []

    def answer(call: Call) -> Reply:
        made.append(call)
        return listing() if call.key == "replicas" else phase("waiting")

    drive(verl().replace(ONE), answer)
    pauses = [c.after_seconds for c in made if c.key.startswith("wait")]
    assert pauses[0] == 2 and pauses[-1] == 16 and pauses == sorted(pauses) and sum(pauses) > 1500


def test_the_watch_file() -> None:
    good = {"actuator": {"kind": "verl", "url": URL, "token_path": "/t"}, "roles": ["rollout"]}
    config = parse_watched(good)
    assert config.actuator is not None and target_of(config.actuator).name == "verl"
    with pytest.raises(ConfigError, match="begin_seconds: must be shorter than deadline_seconds"):
        parse_watched({**good, "deadline_seconds": 240})
    with pytest.raises(ConfigError, match="token_path"):
        parse_watched({**good, "actuator": {"kind": "verl", "url": URL}})
