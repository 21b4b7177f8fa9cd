"""A command of the user's own: what it is given, and what its end means."""

from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.config.actuators import CommandActuator
from rolecall.core.config.watched import load_watched, parse_watched
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError, ConfigError
from rolecall.recovery.actuators.calls import Call, CommandCall, Reply
from rolecall.recovery.actuators.targets.choice import target_of
from rolecall.recovery.actuators.targets.command import Command
from rolecall.recovery.actuators.targets.target import Member, Order

REPLACE = ["evict", "{node}", "end {pid}", "{replica} {role} {index} {rank} {job} {{x}}", "{incident}: {because}"]


def member(replica: str, rank: int = 0, node: str = "n-1", job: str = "77") -> Member:
    return Member(replica=replica, rank=rank, node=node, pid=40 + rank, start_ticks=9, job=job)


def named(job: str) -> Member:
    return member("rollout/1", job=job)


def order(*, leave_node: bool = False, begun: bool = False, members: bool = True) -> Order:
    others = (member("rollout/2"), member("rollout/3", node="n-2"), member("rollout/4", job="78"))
    return Order(
        key="d:rollout/1",
        incident_id="inc-1-x",
        replica="rollout/1",
        incarnation=2,
        node="n-1",
        because="it hangs; rm -rf {pid}",
        members=(member("rollout/1"), member("rollout/1", 1)) if members else (),
        others=others,
        leave_node=leave_node,
        begun=begun,
    )


def command(**config: object) -> Command:
    return Command(CommandActuator.model_validate({"kind": "command", "replace": REPLACE, **config}))


def first(target: Command, given: Order) -> Call:
    return next(target.replace(given))


def test_arguments_are_filled_and_stay_arguments() -> None:
    call = first(command(), order())
    assert isinstance(call, CommandCall)
    assert call.argv[1:] == (
        "n-1",
        "end 40",
        "rollout/1 rollout 1 0 77 {x}",
        "inc-1-x: it hangs; rm -rf {pid}",
    )
    assert call.environment == {"ROLECALL_ACTION_KEY": "d:rollout/1"} and not call.repeatable


@pytest.mark.parametrize("job", ["77", "4711.0", "host-1:29500", "a/b@c_d"])
def test_a_plain_name_of_the_job_is_an_argument(job: str) -> None:
    call = first(command(replace=["ssh", "{node}", "scancel", "{job}"]), replace(order(), members=(named(job),)))
    assert isinstance(call, CommandCall) and call.argv[-1] == job


@pytest.mark.parametrize("job", ["--user=bob", "77; reboot", "$(reboot)", "77 78", "77\n78", "~", "", "\u0667"])
def test_a_command_that_names_the_job_refuses_what_is_no_plain_name(job: str) -> None:
    given = replace(order(), members=(named(job),))
    with pytest.raises(ActuatorError, match=r"the command names \{job\}, and that of rollout/1 is '.*', not letters"):
        first(command(replace=["ssh", "{node}", "scancel", "{job}"]), given)
    assert first(command(replace=["ssh", "{node}", "kill {pid} {{job}}"]), given).shown == "ssh n-1 'kill 40 {job}'"


def test_a_fault_that_stays_with_the_node_has_a_command_of_its_own() -> None:
    assert command().supports == {ActionKind.REPLACE_REPLICA}
    moving = command(move=["drain", "{node}"])
    assert moving.supports == {ActionKind.REPLACE_REPLICA, ActionKind.REPLACE_NODE}
    assert first(moving, order(leave_node=True)).shown == "drain n-1"
    assert first(moving, order()).shown.startswith("evict")


def test_it_is_done_when_the_command_ends_with_0_and_failed_otherwise() -> None:
    procedure = command().replace(order())
    next(procedure)
    with pytest.raises(StopIteration, match="evict ended with 0"):
        procedure.send(Reply(status=0))
    for reply in (Reply(status=1, text="no such process"), Reply(status=-1, text="not done within 60 s")):
        procedure = command().replace(order())
        next(procedure)
        with pytest.raises(ActuatorError, match=reply.text):
            procedure.send(reply)


def test_without_a_process_nothing_is_called() -> None:
    with pytest.raises(ActuatorError, match="no process of rollout/1#2 is seen"):
        first(command(), order(members=False))
    with pytest.raises(StopIteration, match="rollout/1#2 has ended"):
        first(command(), order(members=False, begun=True))


@pytest.mark.parametrize(
    ("also_ends", "expected"),
    [("nothing", []), ("node", ["rollout/2", "rollout/4"]), ("job", ["rollout/2", "rollout/3"])],
)
def test_what_else_it_takes_down(also_ends: str, expected: list[str]) -> None:
    assert list(command(also_ends=also_ends).also_hit(order())) == expected


@pytest.mark.parametrize(
    ("actuator", "problem"),
    [
        ({"kind": "command", "replace": ["kill", "{process}"]}, r"\{process\} is not known here, only \{because\}"),
        ({"kind": "command", "replace": ["kill", "{pid"]}, "actuator"),
        ({"kind": "command", "replace": ["kill", "{node:d}"]}, "Unknown format code 'd' for object of type 'str'"),
        ({"kind": "command", "replace": []}, "actuator"),
        ({"kind": "command", "replace": [""]}, "expected a program"),
        ({"kind": "command", "replace": ["x"], "move": []}, "expected a program"),
        ({"kind": "command", "replace": ["/usr/bin/ssh", "{node}", "end", "{because}"]}, "shell of the other machine"),
        ({"kind": "command", "replace": ["timeout", "9", "ssh", "{node}", "log {because}"]}, "shell of the other"),
        ({"kind": "command", "replace": ["x"], "move": ["ssh", "{node}", "{because!s}"]}, "shell of the other machine"),
        ({"kind": "command", "replace": ["bash", "-lc", "log '{because}'"]}, "an argument of its own"),
        ({"kind": "nothing known", "replace": ["x"]}, r"actuator\.kind: expected one of 'command', 'processes'"),
        ({"replace": ["x"]}, r"actuator\.kind: missing"),
        ({"kind": "command", "replace": "kill"}, r"actuator\.replace: expected a list, got 'kill'"),
        ({"kind": "miles", "url": "http://"}, r"actuator\.url: expected http\[s\]://HOST\[:PORT\], got 'http://'"),
        ({"kind": "torchft", "url": "http://head:99999"}, r"actuator\.url: Port out of range"),
        ({"kind": "torchft", "url": "http://head:1"}, r"roles: rollout is not in actuator\.groups"),
        ({"kind": "miles", "url": "http://head:1", "cells": {"trainer": "a"}}, r"rollout is not in actuator\.cells"),
        ({"kind": "verl", "url": "http://h:1", "token_path": "/t", "roles": ["engine"]}, r"not in actuator\.roles"),
        (
            {"kind": "torchft", "url": "http://h:1", "processes": {"kind": "processes", "grace_seconds": 600}},
            "deadline_seconds: must be at least 630",
        ),
    ],
)
def test_mistakes_are_named(actuator: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_watched({"actuator": actuator, "roles": ["rollout"]}, "watch.yaml")


@pytest.mark.parametrize(
    "argv",
    [
        ["sh", "-c", 'log "$1" && end "$0"', "{pid}", "{because}"],
        ["evict", "-c", "{because}"],
        ["ssh", "{node}", "end {pid}", "{{because}}"],
    ],
)
def test_a_command_whose_shell_does_not_read_the_reason_is_accepted(argv: list[str]) -> None:
    assert isinstance(first(command(replace=argv), order()), CommandCall)


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "watch.yaml"
    path.write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="the file has no content"):
        load_watched(path)


def test_a_mode_that_acts_needs_an_actuator() -> None:
    with pytest.raises(ConfigError, match=r"recovery\.mode: act needs an actuator"):
        parse_watched({"recovery": {"mode": "act"}})
    with pytest.raises(ConfigError, match="unknown key"):
        parse_watched({"num_steps": 3})
    with pytest.raises(ConfigError, match="roles: name the roles whose replicas may be replaced"):
        parse_watched({"actuator": {"kind": "command", "replace": ["true"]}})
    with pytest.raises(ConfigError, match="roles: 'A B' is no role"):
        parse_watched({"roles": ["A B"]})
    assert parse_watched({}).recovery.mode == "observe"


def test_the_configuration_names_its_target() -> None:
    config = parse_watched({"actuator": {"kind": "command", "replace": ["true"]}, "roles": ["rollout"]}).actuator
    assert config is not None and target_of(config).name == "command"


def test_what_may_be_of_the_same_job_ends_too() -> None:
    """A job is known by its run id to some, by its rendezvous to others, and to some not at all."""

    def of(replica: str, job: str, rendezvous: str = "") -> Member:
        return Member(replica=replica, rank=0, node="n-1", pid=40, start_ticks=9, job=job, rendezvous=rendezvous)

    others = (of("rollout/2", "h:1"), of("trainer/0", ""), of("rollout/3", "h:2", "h:2"))
    given = Order(
        key="k",
        incident_id="i",
        replica="rollout/1",
        incarnation=1,
        node="n-1",
        because="",
        members=(of("rollout/1", "77", "h:1"),),
        others=others,
    )
    assert command(also_ends="job").also_hit(given) == ["rollout/2", "trainer/0"]
    unknown = Order(
        **{name: getattr(given, name) for name in given.__slots__} | {"members": (of("rollout/1", ""),)},
    )
    assert command(also_ends="job").also_hit(unknown) == ["rollout/2", "rollout/3", "trainer/0"]


def test_one_call_takes_no_longer_than_the_action_may() -> None:
    actuator = {"kind": "command", "replace": ["true"], "call_seconds": 400}
    with pytest.raises(ConfigError, match="deadline_seconds: must be at least 400"):
        parse_watched({"actuator": actuator, "roles": ["rollout"]})
    parse_watched({"actuator": actuator, "roles": ["rollout"], "deadline_seconds": 400})
