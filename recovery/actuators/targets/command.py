"""Any system: a command of the user's own."""

import re
from collections.abc import Sequence
from string import Formatter

from rolecall.core.config.actuators import CommandActuator
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.recovery.actuators.calls import CommandCall, Procedure
from rolecall.recovery.actuators.targets.target import Member, Order

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*")
"""What neither a shell nor a program reads as anything but a word."""


class Command:
    name = "command"

    def __init__(self, config: CommandActuator) -> None:
        self._config = config
        move = {ActionKind.REPLACE_NODE} if config.move is not None else set()
        self.supports = frozenset({ActionKind.REPLACE_REPLICA, *move})

    def also_hit(self, order: Order) -> Sequence[str]:
        match self._config.also_ends:
            case "node":
                return sorted({m.label for m in order.others if m.node in order.nodes})
            case "job" if order.members:
                # A job may be known by its run id to one and by its rendezvous to another. One that is not known may
                # be this one.
                ours = [_jobs(m) for m in order.members]
                return sorted(
                    {m.label for m in order.others if not _jobs(m) or any(not jobs or jobs & _jobs(m) for jobs in ours)}
                )
        return ()

    def replace(self, order: Order) -> Procedure:
        if not order.members:
            if order.begun:
                return f"{order.replica}#{order.incarnation} has ended"
            raise ActuatorError(f"no process of {order.replica}#{order.incarnation} is seen: nothing to end")
        first = order.members[0]
        fields = {
            **order.fields,
            "rank": first.rank,
            "pid": first.pid,
            "start_ticks": first.start_ticks,
            "job": first.job,
            "incident": order.incident_id,
            "because": order.because,
        }
        template = self._config.move if order.leave_node and self._config.move is not None else self._config.replace
        names_job = any(name == "job" for text in template for _, name, _, _ in Formatter().parse(text))
        if names_job and not _PLAIN.fullmatch(first.job):  # chosen by the job: "--user=bob", "x; reboot"
            told = f"the command names {{job}}, and that of {order.replica} is {first.job!r}"
            raise ActuatorError(f"{told}, not letters, digits and _.:/@-, a letter or digit first")
        argv = tuple(text.format_map(fields) for text in template)
        reply = yield CommandCall(
            key="command",
            words=f"run the command that {'moves' if order.leave_node else 'replaces'} {order.replica}",
            argv=argv,
            environment={"ROLECALL_ACTION_KEY": order.key},
            repeatable=self._config.repeatable,
            deadline_seconds=self._config.call_seconds,
        )
        if reply.status != 0:
            raise ActuatorError(f"{argv[0]}: {reply.shown}")
        return f"{argv[0]} ended with 0"


def _jobs(member: Member) -> set[str]:
    return {member.job, member.rendezvous} - {""}
