"""Ends engine processes whose server is gone, by PID and start time, where their node proves that they are orphans."""

from collections.abc import Sequence

from rolecall.core.config.actuators import ReaperConfig
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.core.text import IS_GONE
from rolecall.recovery.actuators.calls import CommandCall, Procedure
from rolecall.recovery.actuators.targets.target import Order


class Reaper:
    """A target that ends what nobody replaces."""

    name = "orphans"
    supports = frozenset({ActionKind.END_ORPHAN})

    def __init__(self, config: ReaperConfig) -> None:
        self._config = config

    def also_hit(self, order: Order) -> Sequence[str]:
        del order
        return ()

    def replace(self, order: Order) -> Procedure:
        """`order.members`: the orphan alone. The command refuses a process that is no orphan when it is called."""
        config, (orphan,) = self._config, order.members
        nodes = sorted({m.node for m in (orphan, *order.others) if not m.foreign})
        if len(nodes) > 1 and not config.run_on_node:
            raise ActuatorError(f"the job runs on {', '.join(nodes)}: orphans.run_on_node must say how to reach a node")
        prefix = tuple(text.format(node=orphan.node) for text in config.run_on_node)
        reply = yield CommandCall(
            key="orphan",
            words=f"end the orphan with pid {orphan.pid} on {orphan.node}",
            argv=(
                *prefix,
                *config.program,
                *("node", "end", str(orphan.pid), "--start-ticks", str(orphan.start_ticks), "--orphan"),
                *(("--grace", f"{config.grace_seconds:g}") if config.grace_seconds else ()),
            ),
            repeatable=True,  # only that process, and only while it is an orphan
            deadline_seconds=config.call_seconds + config.grace_seconds,
        )
        if reply.status != 0:
            raise ActuatorError(f"pid {orphan.pid} on {orphan.node}: {reply.shown}")
        if reply.text.rstrip().endswith(IS_GONE):
            here = "" if config.run_on_node else ", or orphans.run_on_node must say how to reach that node"
            return f"no orphan with pid {orphan.pid} was found for {orphan.node}: it had ended before{here}"
        return f"ended the orphan with pid {orphan.pid} on {orphan.node}"
