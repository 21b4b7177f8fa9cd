"""verl: the job's plugin replaces a standalone rollout replica at verl's next weight update.

The plugin (`rolecall/integrations/verl_control.py`) lists the replicas with their processes, and takes one order for
each key: the replica leaves the balancer and the weight updates, its processes end, a new engine starts, gets weights
with the update after that, and then requests. An order names the engine that runs; a later one is left alone.
"""

from collections.abc import Generator, Mapping, Sequence
from itertools import count
from typing import Any
from urllib.parse import quote

from rolecall.core.config.actuators import VerlActuator
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.recovery.actuators.calls import NOT_SENT, Call, HttpCall, Procedure, Reply
from rolecall.recovery.actuators.targets.target import HasEnded, Order

OK, NOT_FOUND = 200, 404
STANDALONE = "standalone"
WAITING, STARTING, STARTED, JOINING, SERVING, FAILED = (
    "waiting", "starting", "started", "joining", "serving", "failed",
)  # fmt: skip
"""Phases of an order (rolecall/integrations/verl_replacements.py)."""
PHASES = (WAITING, STARTING, STARTED, JOINING, SERVING, FAILED)
TRIES_MAX = 4
"""Of an order that the job did not answer."""
POLLS_AT_ONE_PACE, PACE_MAX = 20, 8
"""After so many looks the pause between two becomes longer, up to this many times `poll_seconds`."""
LOOKS_MAX = 180
ENDED_LOOKS_MAX, ENDED_SECONDS = 10, 0.5
"""For Ray to notice that a process is gone which the agent no longer sees."""
CONSTRUCTED_SECONDS = 300.0
"""A process may be seen before Ray calls its actor alive, which it does after the constructor; and clocks differ."""


class Verl:
    name = "verl"
    supports = frozenset({ActionKind.REPLACE_REPLICA})

    def __init__(self, config: VerlActuator) -> None:
        self._config, self._url = config, config.url.rstrip("/")

    def also_hit(self, order: Order) -> Sequence[str]:
        return ()

    def replace(self, order: Order) -> Procedure:
        if order.role not in self._config.roles:
            raise ActuatorError(f"{order.replica}: there is no replica of verl for a {order.role}")
        if order.begun:
            known = yield self._look(order, "known", assumed=False)
            if known.status != NOT_FOUND:  # the order has arrived, or the job is asked again
                return (yield from self._wait(order))
        instance = yield from self._instance(order)
        yield from self._order(order, instance)
        return (yield from self._wait(order))

    def _instance(self, order: Order) -> Generator[Call, Reply, str]:
        """The engine that holds the processes of the order. Raises ActuatorError: none that may be replaced does."""
        for n in count():
            reply = yield HttpCall(
                key=f"replicas-{n}" if n else "replicas",
                words="read the job's rollout replicas",
                changes=False,
                after_seconds=ENDED_SECONDS if n else 0.0,
                method="GET",
                url=f"{self._url}/v1/replicas",
                token_path=self._config.token_path,
                deadline_seconds=self._config.call_seconds,
            )
            entry = _entry_of(order, _entries(reply))
            try:
                _check(order, entry)
            except HasEnded:
                if order.members or n >= ENDED_LOOKS_MAX:
                    raise
            else:
                return str(entry["instance"])
        raise AssertionError

    def _order(self, order: Order, instance: str) -> Generator[Call, Reply, None]:
        """Asks again if the job cannot answer now: an order with the same key is the same order."""
        reply, may_have_arrived = Reply(status=NOT_SENT), False
        for n in range(TRIES_MAX):
            reply = yield HttpCall(
                key=f"order-{n}" if n else "order",
                words=f"order the replacement of {order.replica} at the job's next weight update",
                repeatable=True,
                after_seconds=float(n),
                method="PUT",
                url=self._url_of(order),
                body={"replica": order.index, "instance": instance, "within_seconds": self._config.begin_seconds},
                token_path=self._config.token_path,
                deadline_seconds=self._config.call_seconds,
            )
            if not reply.unavailable:
                break
            may_have_arrived |= reply.status != NOT_SENT
        if reply.status != OK:
            doubt = ""
            if reply.unavailable and may_have_arrived:
                doubt = f"; if the order arrived, {order.replica} is replaced at the next weight update"
            raise ActuatorError(f"order the replacement of {order.replica}: {_said(reply)}{doubt}")

    def _wait(self, order: Order) -> Procedure:
        """Looks until the new engine serves. A job that cannot answer now is asked again."""
        for n in count():
            reply = yield self._look(order, f"wait-{n}", after_seconds=self._pause(n))
            if reply.status == NOT_FOUND:
                raise ActuatorError(f"the job does not know of the replacement of {order.replica}: it started again?")
            if not reply.unavailable:
                phase, because = _phase(reply)
                if phase == SERVING:
                    return f"{order.replica}: {because}"
                if phase == FAILED:
                    raise ActuatorError(f"{order.replica}: {because}")
            if n + 1 >= LOOKS_MAX:
                raise ActuatorError(f"the replacement of {order.replica} is not done after {LOOKS_MAX} looks")
        raise AssertionError

    def _pause(self, n: int) -> float:
        return self._config.poll_seconds * min(1 + n // POLLS_AT_ONE_PACE, PACE_MAX)

    def _look(self, order: Order, key: str, *, assumed: bool = True, after_seconds: float = 0.0) -> HttpCall:
        done = '{"phase": "serving", "because": "the new engine has current weights and gets requests"}'
        return HttpCall(
            key=key,
            words=f"see how far the replacement of {order.replica} is, which the job makes at its weight updates",
            changes=False,
            assumed=Reply(status=OK, text=done) if assumed else None,
            after_seconds=after_seconds,
            method="GET",
            url=self._url_of(order),
            token_path=self._config.token_path,
            deadline_seconds=self._config.call_seconds,
        )

    def _url_of(self, order: Order) -> str:
        return f"{self._url}/v1/replacements/{quote(order.key, safe='')}"


def _entries(reply: Reply) -> list[Mapping[str, Any]]:
    """Raises ActuatorError: the reply is no list of replicas."""
    if reply.status != OK:
        raise ActuatorError(f"the job's rollout replicas: {_said(reply)}")
    body = reply.json
    entries = body.get("replicas") if isinstance(body, dict) else None
    if not isinstance(entries, list) or not all(_is_entry(e) for e in entries):
        raise ActuatorError("the job's rollout replicas: what answers is not rolecall's plugin in a verl job")
    return entries


def _entry_of(order: Order, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Raises ActuatorError: the job has no such replica, or it cannot be replaced."""
    found = [e for e in entries if e["replica"] == order.index]
    if len(found) != 1:
        listed = ", ".join(str(e["replica"]) for e in entries)
        raise ActuatorError(f"{order.replica}: the job has {len(found)} replicas {order.index}, of {listed or 'none'}")
    (entry,) = found
    if entry["refusal"]:
        raise ActuatorError(f"{order.replica}: {entry['refusal']}")
    if entry["state"] == "replacing":
        raise ActuatorError(f"{order.replica} is being replaced by somebody else")
    return entry


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("replica"), int):
        return False
    texts = all(isinstance(entry.get(name), str) for name in ("mode", "instance", "state", "refusal"))
    processes = entry.get("processes")
    return texts and isinstance(processes, list) and all(_is_process(p) for p in processes)


def _is_process(process: Any) -> bool:
    return (
        isinstance(process, dict)
        and isinstance(process.get("pid"), int)
        and isinstance(process.get("started_at"), int | float)
        and isinstance(process.get("alive"), bool)
        and isinstance(process.get("server"), bool)
        and isinstance(process.get("host", ""), str)
        and all(isinstance(name, str) for name in _names(process))
    )


def _names(process: Mapping[str, Any]) -> Sequence[Any]:
    """Of its host, as Ray knows it; none: not known, or not told by an older plugin."""
    names = process.get("names")
    return names if isinstance(names, list) else ()


def _may_be_on(process: Mapping[str, Any], node: str) -> bool:
    """Whether its host may be the node with this name of its agent."""
    names = _names(process)
    return not names or any(_is_same_host(node.lower(), name.lower()) for name in (*names, process.get("host", "")))


def _is_same_host(one: str, other: str) -> bool:
    """Names, or addresses; one may lack its domain."""
    shorter, longer = sorted((one, other), key=len)
    return one == other or ("." not in shorter and longer.partition(".")[0] == shorter)


def _check(order: Order, entry: Mapping[str, Any]) -> None:
    """Raises HasEnded: what the job runs is not the incarnation that is to be replaced; ActuatorError: it runs on
    another host, where a process has the same PID."""
    named = f"{order.replica}#{order.incarnation}"
    processes = entry["processes"]
    if not order.members:
        servers = [p for p in processes if p["server"]]
        if servers and all(p["alive"] for p in servers):
            raise HasEnded(f"no process of {named} is seen, and the job's replica {order.index} runs")
        return
    for member in order.members:
        having = [p for p in processes if p["pid"] == member.pid]
        if not having:
            pids = ", ".join(str(pid) for pid in sorted({p["pid"] for p in processes})) or "none"
            raise HasEnded(f"pid {member.pid} of {named} is no process of the job's replica {order.index} ({pids})")
        here = [p for p in having if _may_be_on(p, member.node)]
        if not here:
            hosts = "; ".join(", ".join((*_names(p), p.get("host", ""))) for p in having)
            raise ActuatorError(
                f"pid {member.pid} of {named} is on {member.node}, and the job's replica {order.index} has this pid on"
                f" another host ({hosts}); if that is the same one, give its agent one of these names (`node`)"
            )
        if member.registered_at and all(p["started_at"] > member.registered_at + CONSTRUCTED_SECONDS for p in here):
            raise HasEnded(f"pid {member.pid} of the job's replica {order.index} started after {named}")


def _phase(reply: Reply) -> tuple[str, str]:
    """Raises ActuatorError: the reply tells none."""
    body = reply.json
    if reply.status == OK and isinstance(body, dict) and body.get("phase") in PHASES:
        return str(body["phase"]), str(body.get("because", ""))
    raise ActuatorError(f"how far the replacement is: {_said(reply)}")


def _said(reply: Reply) -> str:
    """The status, and the reason that the plugin gives."""
    body = reply.json
    error = body.get("error") if isinstance(body, dict) else None
    return f"status {reply.status}: {error}" if isinstance(error, str) else reply.shown
