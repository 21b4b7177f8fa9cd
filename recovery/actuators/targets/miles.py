"""miles: a replica is a cell, which is suspended and resumed.

The control server (`miles/utils/ft_utils/control_server/server.py`) has `GET` and `PATCH /api/v1/cells/{name}`.
Suspending stops the cell's actors, resuming starts new ones, and a trainer cell heals from a living one at the next
step.
"""

from collections.abc import Sequence

from rolecall.core.config.actuators import MilesActuator
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.recovery.actuators.calls import HttpCall, Procedure, Reply
from rolecall.recovery.actuators.targets.target import Order

OK = 200
SUSPENDED = "Suspended"
"""Phase of a cell whose actors are stopped."""


class Miles:
    name = "miles"
    supports = frozenset({ActionKind.REPLACE_REPLICA})

    def __init__(self, config: MilesActuator) -> None:
        self._config = config

    def also_hit(self, order: Order) -> Sequence[str]:
        return ()

    def replace(self, order: Order) -> Procedure:
        template = self._config.cells.get(order.role)
        if template is None:
            raise ActuatorError(f"{order.replica}: there is no cell of a {order.role}")
        name = template.format_map(order.fields)
        url = f"{self._config.url.rstrip('/')}/api/v1/cells/{name}"
        read = HttpCall(key="read", words=f"read cell {name}", changes=False, method="GET", url=url)
        if _is_suspended((yield read), name) and not order.begun:
            raise ActuatorError(f"cell {name} is suspended: somebody else is at work on it")
        yield from _patch(url, name, suspend=True)
        waiting = HttpCall(
            key="wait",
            words=f"wait until cell {name} is suspended",
            changes=False,
            assumed=Reply(status=OK, text='{"spec": {"suspend": true}, "status": {"phase": "Suspended"}}'),
            after_seconds=self._config.poll_seconds,
            method="GET",
            url=url,
        )
        while not _is_suspended((yield waiting), name):
            pass
        yield from _patch(url, name, suspend=False)
        return f"cell {name} was suspended and resumed"


def _patch(url: str, name: str, *, suspend: bool) -> Procedure:
    word = "suspend" if suspend else "resume"
    body = {"spec": {"suspend": suspend}}
    reply = yield HttpCall(key=word, words=f"{word} cell {name}", repeatable=True, method="PATCH", url=url, body=body)
    if reply.status != OK:
        raise ActuatorError(f"{word} cell {name}: {reply.shown}")
    return ""


def _is_suspended(reply: Reply, name: str) -> bool:
    """Raises ActuatorError: the reply is no cell."""
    cell = reply.json
    if reply.status != OK or not isinstance(cell, dict):
        raise ActuatorError(f"cell {name}: {reply.shown}")
    try:
        return bool(cell["spec"]["suspend"]) and cell["status"]["phase"] == SUSPENDED
    except (KeyError, TypeError):
        raise ActuatorError(f"cell {name}: the control server answers without spec.suspend or status.phase") from None
