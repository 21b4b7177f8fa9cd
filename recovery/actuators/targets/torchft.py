"""torchft: the lighthouse has a replica group end itself; whatever launched it starts it again.

`GET /status` is a page that lists the groups of the newest quorum; `POST /replica/{replica_id}/kill` passes the request
on to the group's manager, which exits, mostly before it answers: then the lighthouse answers 500. It passes nothing on
to a group that is not in the newest quorum, and a group that hangs leaves the quorum once the others have waited for
the join timeout: its processes are ended instead, if the configuration says how.
"""

import re
from collections.abc import Sequence
from urllib.parse import quote

from rolecall.core.config.actuators import TorchftActuator
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.recovery.actuators.calls import NOT_SENT, HttpCall, Procedure, Reply
from rolecall.recovery.actuators.targets.processes import Processes
from rolecall.recovery.actuators.targets.target import Order

OK, SERVER_ERROR = 200, 500
TRIES_MAX = 4
"""Of a request that did not leave this machine."""
UNKNOWN = "failed to find replica"
"""In the answer of a lighthouse whose newest quorum does not have the group."""


class Torchft:
    name = "torchft"
    supports = frozenset({ActionKind.REPLACE_REPLICA})

    def __init__(self, config: TorchftActuator) -> None:
        self._config = config

    def also_hit(self, order: Order) -> Sequence[str]:
        return ()

    def replace(self, order: Order) -> Procedure:
        template = self._config.groups.get(order.role)
        if template is None:
            raise ActuatorError(f"{order.replica}: there is no replica group of a {order.role}")
        name, url = template.format_map(order.fields), self._config.url.rstrip("/")
        page = yield HttpCall(key="status", words="read the quorum", changes=False, method="GET", url=f"{url}/status")
        if page.status != OK:
            raise ActuatorError(f"{url}/status: {page.shown}")
        found = sorted(set(re.findall(rf"(?<![\w.:-]){re.escape(name)}(?::[0-9a-f-]{{36}})?(?![\w.:-])", page.text)))
        full = [one for one in found if ":" in one.removeprefix(name)] or found
        if not full and self._config.processes is not None:
            return (yield from Processes(self._config.processes).replace(order))
        if len(full) != 1:
            raise ActuatorError(f"the quorum has {len(full)} replica groups {name}: {', '.join(full)}".rstrip(": "))
        reply = Reply(status=NOT_SENT)
        for n in range(TRIES_MAX):
            reply = yield HttpCall(
                key=f"kill-{n}" if n else "kill",
                words=f"end replica group {full[0]}",
                after_seconds=float(n),
                method="POST",
                url=f"{url}/replica/{quote(full[0], safe='')}/kill",
            )
            if reply.status != NOT_SENT:  # a second kill might meet the group's next incarnation
                break
        if UNKNOWN in reply.text and self._config.processes is not None:  # it has left the quorum since
            return (yield from Processes(self._config.processes).replace(order))
        if reply.status not in (OK, SERVER_ERROR) or UNKNOWN in reply.text:
            raise ActuatorError(f"end replica group {full[0]}: {reply.shown}")
        return f"the lighthouse asked {full[0]} to end"
