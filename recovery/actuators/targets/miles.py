"""miles: a replica is a cell, which is suspended and resumed.

The control server (`miles/utils/ft_utils/control_server/server.py`) has `GET` and `PATCH /api/v1/cells/{name}`.
Suspending stops the cell's actors, resuming starts new ones, and a trainer cell heals from a living one at the next
step.
"""

from collections.abc import Sequence
from itertools import count

from rolecall.core.config.actuators import MilesActuator
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.recovery.actuators.calls import NOT_SENT, HttpCall, Procedure, Reply
from rolecall.recovery.actuators.targets.target import Order

OK = 200
TRIES_MAX = 4
"""Of a change that the control server did not answer."""
POLLS_AT_ONE_PACE, PACE_MAX = 20, 5
"""After so many looks the pause between two becomes longer, up to this many times `poll_seconds`."""
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
        to_be_suspended, _ = _suspension((yield read), name)
        if to_be_suspended and not order.begun:
            raise ActuatorError(f"cell {name} is suspended: somebody else is at work on it")
        yield from _patch(url, name, suspend=True)
        # From here on every end but the last must say that the cell is suspended.
        try:
            yield from self._wait(url, name, begun=order.begun)
            yield from _patch(url, name, suspend=False)
        except ActuatorError as e:
            raise ActuatorError(f"{e}; {_by_hand(name)}") from None
        return f"cell {name} was suspended and resumed"

    def _wait(self, url: str, name: str, *, begun: bool) -> Procedure:
        """Looks until the cell is suspended; a control server that cannot answer now is asked again. `begun`: it may
        have been resumed already, by the last call of an earlier watch."""
        for n in count():
            reply = yield HttpCall(
                key=f"wait-{n}",
                words=f"see whether cell {name}, which was asked to be suspended, may be resumed ({_by_hand(name)})",
                changes=False,
                assumed=Reply(status=OK, text='{"spec": {"suspend": true}, "status": {"phase": "Suspended"}}'),
                after_seconds=self._config.poll_seconds * min(1 + n // POLLS_AT_ONE_PACE, PACE_MAX),
                method="GET",
                url=url,
            )
            if not reply.unavailable:
                to_be_suspended, is_suspended = _suspension(reply, name)
                if is_suspended or (begun and not to_be_suspended):
                    return ""
        raise AssertionError


def _patch(url: str, name: str, *, suspend: bool) -> Procedure:
    """Asks again if the control server cannot answer now. Raises ActuatorError: it refuses, or never answers."""
    word = "suspend" if suspend else "resume"
    reply, may_have_arrived = Reply(status=NOT_SENT), False
    for n in range(TRIES_MAX):
        reply = yield HttpCall(
            key=f"{word}-{n}" if n else word,
            words=f"{word} cell {name}",
            repeatable=True,
            after_seconds=float(n),
            method="PATCH",
            url=url,
            body={"spec": {"suspend": suspend}},
        )
        if not reply.unavailable:
            break
        may_have_arrived |= reply.status != NOT_SENT
    if reply.status != OK:
        doubt = f"; {_by_hand(name)}" if suspend and reply.unavailable and may_have_arrived else ""
        raise ActuatorError(f"{word} cell {name}: {reply.shown}{doubt}")
    return ""


def _by_hand(name: str) -> str:
    return f"look whether cell {name} is suspended, and resume it by hand"


def _suspension(reply: Reply, name: str) -> tuple[bool, bool]:
    """Whether the cell is to be suspended, and whether it is. Raises ActuatorError: the reply is no cell."""
    cell = reply.json
    if reply.status != OK or not isinstance(cell, dict):
        raise ActuatorError(f"cell {name}: {reply.shown}")
    try:
        to_be_suspended = bool(cell["spec"]["suspend"])
        return to_be_suspended, to_be_suspended and cell["status"]["phase"] == SUSPENDED
    except (KeyError, TypeError):
        raise ActuatorError(f"cell {name}: the control server answers without spec.suspend or status.phase") from None
