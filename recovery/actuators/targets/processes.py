"""Frameworks that notice a dead process and start it again: the processes of the replica are ended."""

from collections.abc import Sequence

from rolecall.core.config.actuators import ProcessesActuator
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.core.text import IS_GONE, counted
from rolecall.recovery.actuators.calls import CommandCall, Procedure
from rolecall.recovery.actuators.targets.target import Order


class Processes:
    name = "processes"
    supports = frozenset({ActionKind.REPLACE_REPLICA})

    def __init__(self, config: ProcessesActuator) -> None:
        self._config = config

    def also_hit(self, order: Order) -> Sequence[str]:
        return ()

    def replace(self, order: Order) -> Procedure:
        config, named = self._config, f"{order.replica}#{order.incarnation}"
        if not order.members:
            if order.begun:
                return f"{named} has ended"
            raise ActuatorError(f"no process of {named} is seen: nothing to end")
        nodes = sorted({m.node for m in (*order.members, *order.others) if not m.foreign})
        if len(nodes) > 1 and not config.run_on_node:
            raise ActuatorError(
                f"the job runs on {', '.join(nodes)}: actuator.run_on_node must say how to reach a node"
            )
        gone = 0
        for member in order.members:
            prefix = tuple(text.format(node=member.node) for text in config.run_on_node)
            reply = yield CommandCall(
                key=f"rank {member.rank}",
                words=f"end rank {member.rank} of {named}, pid {member.pid} on {member.node}",
                argv=(
                    *prefix,
                    *config.program,
                    *("node", "end", str(member.pid), "--start-ticks", str(member.start_ticks)),
                    *(("--grace", f"{config.grace_seconds:g}") if config.grace_seconds else ()),
                ),
                repeatable=True,  # only that process, whoever has its PID later
                deadline_seconds=config.call_seconds + config.grace_seconds,
            )
            if reply.status != 0:
                raise ActuatorError(f"pid {member.pid} on {member.node}: {reply.shown}")
            gone += reply.text.rstrip().endswith(IS_GONE)
        ended = f"ended {counted(len(order.members) - gone, 'process', 'processes')} of {named}"
        return f"{ended}; {gone} had ended before" if gone else ended
