"""Replacement of standalone rollout replicas inside a verl job: which one, in which phase, and what verl must be told.

    waiting   ordered; begins at the next weight update
    starting  its replica is out of the balancer and of the weight updates, and is ended; a new one starts
    started   the new one runs without current weights; the next weight update includes it
    joining   that update is under way
    serving   the balancer has it
    failed    with the reason

Each phase that waits ends as failed when it lasts too long: `waiting`, `started` and `joining` after the seconds that
the order allows for a weight update to begin, `starting` after START_SECONDS. A new engine that is given up is ended.

The trainer calls `before_update` and `after_update` around verl's own weight update of standalone replicas, where verl
changes its list of replicas, too. Both take milliseconds: a replica is ended and started in a thread. Another thread
reads and orders (verl_control.py). Nothing here raises into the trainer.

Without an order only one thing is done: a replica with a process that is gone is left out of the update, which would
fail at it and end the job.

Refused are orders for a replica that shares its processes with the trainer, for the last one, and for one whose clients
would lose an interrupted request. Standard library only.
"""

import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)

STANDALONE = "standalone"
COLOCATED = "naive"
"""Backend of the weight updates of replicas that share their processes with the trainer."""
WAITING, STARTING, STARTED, JOINING, SERVING, FAILED = (
    "waiting", "starting", "started", "joining", "serving", "failed",
)  # fmt: skip
UNDER_WAY = (WAITING, STARTING, STARTED, JOINING)
START_SECONDS = 1800.0
"""From the end of a replica until its replacement runs: a large model is loaded."""
WITHIN_SECONDS_MAX = 86400.0
ROUTE_SECONDS = 60.0
"""For the balancer to take the new engine, from when its update has ended: `Route.add` has deadlines of its own."""
KEPT_MAX = 100
"""Orders that are remembered."""
KEY_LENGTH_MAX = 200


class Refused(Exception):
    """`status`: of HTTP, as 409 where what was ordered is impossible now."""

    def __init__(self, status: int, because: str) -> None:
        self.status = status
        super().__init__(because)


@dataclass(slots=True)
class Replacement:
    """`instance`: which engine is to be replaced; `within_seconds`: for each wait for a weight update; `expires_at`:
    monotonic seconds until which this phase may last. `old`, `new`: replicas of verl; `manager`: that of their weight
    updates."""

    key: str
    replica: int
    instance: str
    within_seconds: float
    expires_at: float
    phase: str = WAITING
    because: str = "it begins at the next weight update"
    manager: Any = None
    old: Any = None
    new: Any = None

    @property
    def is_under_way(self) -> bool:
        return self.phase in UNDER_WAY

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key, "replica": self.replica, "phase": self.phase, "because": self.because}


class Cluster(Protocol):
    """What is asked of Ray (verl_engines.py). Blocks, within deadlines of its own."""

    def instance(self, replica: Any) -> str:
        """Name of its engine, different from those of all others before and after."""

    def processes(self, replica: Any) -> list[dict[str, Any]]:
        """`pid`, `host` (its address), `names` (of the host), `started_at` (wall seconds), `alive`, `server` of each.
        Raises whatever Ray does."""

    def end(self, replica: Any) -> None:
        """Returns the requests of the replica that it can still return, ends its processes, and frees its devices; what
        has ended already stays so. Raises TimeoutError: they have not ended."""

    def start(self, old: Any) -> Any:
        """A new replica in the place of `old`. Raises whatever verl does; then nothing of it is left."""


class Route(Protocol):
    """How requests reach a replica. Each returns within seconds, or raises; then it has changed nothing, or may be
    called again."""

    def remove(self, replica: Any) -> Awaitable[None]: ...
    def add(self, replica: Any) -> Awaitable[None]: ...


class Replacements:
    """Of one process. `route_of`: of a replica, None where it is not known. `resumes`: whether clients of a replica
    take up an interrupted request elsewhere. `run`: in a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        route_of: Callable[[Any], Route | None],
        resumes: Callable[[Any], bool],
        monotonic: Callable[[], float],
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        self._cluster, self._route_of, self._resumes = cluster, route_of, resumes
        self._monotonic, self._run = monotonic, run
        self._lock = threading.Lock()
        self._managers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._orders: dict[str, Replacement] = {}
        self._ended: dict[int, tuple[Any, Any]] = {}  # number -> manager, replica: ended, and no replacement serves

    # --- what the control thread asks --------------------------------------------------------------------------------

    def listing(self) -> list[dict[str, Any]]:
        """Every replica that is known, with its processes and why it cannot be replaced (`refusal`; empty: it can)."""
        found = []
        for manager, replica in self._known():
            number = int(replica.replica_rank)
            entry = {
                "replica": number,
                "mode": _mode(replica),
                "instance": self._cluster.instance(replica),
                "state": "replacing" if self._is_busy(number) else "serving",
                "refusal": self._refusal(manager, replica),
                "processes": self._cluster.processes(replica),
            }
            found.append(entry)
        with self._lock:
            ended = dict(self._ended)
        listed = {entry["replica"] for entry in found}
        for number in ended.keys() - listed:
            entry = {
                "replica": number,
                "mode": STANDALONE,
                "instance": self._cluster.instance(ended[number][1]),
                "state": "replacing" if self._is_busy(number) else "ended",
                "refusal": "",
                "processes": self._cluster.processes(ended[number][1]),
            }
            found.append(entry)
        return sorted(found, key=lambda entry: entry["replica"])

    def order(self, key: str, number: int, instance: str, within_seconds: float) -> dict[str, Any]:
        """Orders a replacement, or tells how far the one with this key is. Raises Refused."""
        with self._lock:
            self._end_late()
            known = self._orders.get(key)
            if known is not None:
                if (known.replica, known.instance) != (number, instance):
                    raise Refused(409, f"{key} is the key of a replacement of replica {known.replica}")
                return known.to_dict()
            busy = next((o for o in self._orders.values() if o.is_under_way), None)
            if busy is not None:
                raise Refused(409, f"replica {busy.replica} is being replaced ({busy.phase}): one at a time")
            self._check(number, instance)
            within_seconds = min(within_seconds, WITHIN_SECONDS_MAX)
            it = Replacement(key, number, instance, within_seconds, self._monotonic() + within_seconds)
            done = [k for k, o in self._orders.items() if not o.is_under_way]
            for old in done[: max(0, len(self._orders) + 1 - KEPT_MAX)]:
                del self._orders[old]
            self._orders[key] = it
            return it.to_dict()

    def state(self, key: str) -> dict[str, Any] | None:
        """None: nothing with this key was ordered, or it is forgotten."""
        with self._lock:
            self._end_late()
            known = self._orders.get(key)
            return None if known is None else known.to_dict()

    def _check(self, number: int, instance: str) -> None:
        """With the lock held."""
        found = [(m, r) for m, r in self._known() if int(r.replica_rank) == number]
        found = found or [self._ended[n] for n in self._ended if n == number]
        if len(found) != 1:
            raise Refused(404 if not found else 409, f"there are {len(found)} replicas {number}")
        manager, replica = found[0]
        refusal = "" if number in self._ended else self._refusal(manager, replica)
        if refusal:
            raise Refused(409, f"replica {number}: {refusal}")
        newest = self._cluster.instance(replica)
        if newest != instance:
            raise Refused(409, f"replica {number} is engine {newest} by now")

    # --- around verl's weight update ---------------------------------------------------------------------------------

    async def before_update(self, manager: Any) -> None:
        """Takes out the replica that is to be replaced, and includes the one that has started."""
        try:
            self._managers.add(manager)
            if manager.backend == COLOCATED:
                return
            self._withdraw(manager)
            for it in self._due():
                if it.phase == STARTED and it.manager is manager:
                    self._include(manager, it)
                elif it.phase == WAITING:
                    await self._take_out(manager, it)
            await self._leave_out_ended(manager)
        except Exception as e:  # noqa: BLE001 the update goes on
            logger.warning("rolecall replaces nothing at this weight update: %s: %s", type(e).__name__, e)

    async def after_update(self, manager: Any) -> None:
        """The replica that was included has the weights: requests may come."""
        try:
            self._withdraw(manager)
            for it in self._due():
                if it.phase == JOINING and it.new in manager.replicas:
                    await self._serve(it)
        except Exception as e:  # noqa: BLE001 the job goes on
            logger.warning("rolecall could not finish a replacement: %s: %s", type(e).__name__, e)

    def update_failed(self, manager: Any, error: BaseException) -> None:
        """The job may try again: without the new replica, which may be why it failed."""
        try:
            self._withdraw(manager)
            for it in self._due():
                if it.phase == JOINING and it.new in manager.replicas:
                    manager.remove_replicas([it.new])
                    self._fail(it, f"the weight update with the new engine failed: {type(error).__name__}: {error}")
                    self._discard(it.new)
        except Exception as e:  # noqa: BLE001 the job's own exception goes on
            logger.warning("rolecall could not end a replacement: %s: %s", type(e).__name__, e)

    async def _take_out(self, manager: Any, it: Replacement) -> None:
        with self._lock:
            it.manager, it.old = self._ended.get(it.replica, (None, None))
        if it.old is not None:
            return self._replace(it) if it.manager is manager else None
        old = next((r for r in manager.replicas if int(r.replica_rank) == it.replica), None)
        if old is None:
            return None  # of another manager
        refusal = self._refusal(manager, old) or (
            "" if self._cluster.instance(old) == it.instance else "another engine runs by now"
        )
        route = self._route_of(old)
        if refusal or route is None:
            return self._fail(it, refusal or "its load balancer is not known")
        try:
            await route.remove(old)
        except Exception as e:  # noqa: BLE001 nothing is ended whose requests may go on to come
            return self._fail(it, f"requests could not be led elsewhere: {type(e).__name__}: {e}")
        manager.remove_replicas([old])
        with self._lock:
            it.manager, it.old = self._ended[it.replica] = manager, old
        return self._replace(it)

    async def _leave_out_ended(self, manager: Any) -> None:
        """verl's update would fail at a replica with a process that is gone, and end the job. Nothing is replaced: that
        takes an order."""
        for replica in list(manager.replicas):
            route = self._route_of(replica)
            if self._refusal(manager, replica) or route is None:
                continue
            if all(p["alive"] for p in self._cluster.processes(replica)):
                continue
            number = int(replica.replica_rank)
            try:
                await route.remove(replica)
            except Exception as e:  # noqa: BLE001 the next one may be left out all the same
                logger.warning(
                    "rolecall cannot leave out rollout replica %s, which has ended: %s: %s", number, type(e).__name__, e
                )
                continue
            manager.remove_replicas([replica])
            with self._lock:
                self._ended[number] = manager, replica
            logger.warning("rolecall: rollout replica %s has ended, and is left out of weight updates", number)
            for it in self._due():
                if it.phase == JOINING and it.new is replica:
                    self._fail(it, "the new engine ended before it got requests")

    def _replace(self, it: Replacement) -> None:
        with self._lock:
            it.phase, it.because = STARTING, "its engine is ended, and a new one starts"
            it.expires_at = self._monotonic() + START_SECONDS
        logger.warning("rolecall replaces rollout replica %s (%s)", it.replica, it.key)
        self._run(lambda: self._restart(it))

    def _restart(self, it: Replacement) -> None:
        """In a thread of its own."""
        try:
            self._cluster.end(it.old)
            new = self._cluster.start(it.old)
        except Exception as e:  # noqa: BLE001 the job goes on with one replica less
            self._fail(it, f"the new engine did not start: {type(e).__name__}: {e}")
            return
        with self._lock:
            self._end_late()
            is_wanted = it.phase == STARTING
            if is_wanted:
                it.new, it.phase = new, STARTED
                it.because = "the new engine runs, and gets weights with the next update"
                it.expires_at = self._monotonic() + it.within_seconds
        if not is_wanted:
            self._discard(new)

    def _include(self, manager: Any, it: Replacement) -> None:
        if not all(p["alive"] for p in self._cluster.processes(it.new)):
            self._fail(it, "the new engine ended before it had weights")
            return self._discard(it.new)
        with self._lock:
            self._end_late()
            if it.phase != STARTED:
                return None
            it.phase, it.because = JOINING, "the new engine gets weights"
            it.expires_at = self._monotonic() + it.within_seconds
        manager.add_replicas([it.new])
        return None

    def _withdraw(self, manager: Any) -> None:
        """Ends new engines that were given up while they were part of the updates, which change here only."""
        with self._lock:
            self._end_late()
            given_up = [it.new for it in self._orders.values() if it.phase == FAILED and it.new is not None]
        for new in given_up:
            if new in manager.replicas:
                manager.remove_replicas([new])
                self._discard(new)

    async def _serve(self, it: Replacement) -> None:
        with self._lock:
            self._end_late()
            if it.phase != JOINING:
                return
            it.expires_at = max(it.expires_at, self._monotonic() + ROUTE_SECONDS)  # it is not given up meanwhile
        route = self._route_of(it.new)
        try:
            assert route is not None  # it has that of its predecessor
            await route.add(it.new)
        except Exception as e:  # noqa: BLE001 the next update tries again
            with self._lock:
                it.because = f"the balancer did not take the new engine: {type(e).__name__}: {e}"
            return
        with self._lock:
            self._ended.pop(it.replica, None)
            it.phase, it.because = SERVING, "the new engine has current weights and gets requests"
        logger.warning("rolecall replaced rollout replica %s (%s)", it.replica, it.key)

    # --- state -------------------------------------------------------------------------------------------------------

    def _known(self) -> list[tuple[Any, Any]]:
        return [(m, r) for m in list(self._managers) for r in list(m.replicas)]

    def _due(self) -> Sequence[Replacement]:
        """Those that are under way, and not too late."""
        with self._lock:
            self._end_late()
            return [it for it in self._orders.values() if it.is_under_way]

    def _is_busy(self, number: int) -> bool:
        return any(it.replica == number for it in self._due())

    def _end_late(self) -> None:
        """With the lock held. An engine that has started and waits for weights is ended; one that is part of the
        updates by now only where those change (`_withdraw`)."""
        now = self._monotonic()
        for it in self._orders.values():
            if it.is_under_way and now > it.expires_at:
                was, it.phase = it.phase, FAILED
                it.because = {
                    WAITING: f"no weight update began within {it.within_seconds:g} s, and nothing was changed",
                    STARTING: f"the new engine did not start within {START_SECONDS:g} s",
                    STARTED: f"the new engine ran, and no weight update began within {it.within_seconds:g} s",
                    JOINING: f"the new engine did not get weights and requests within {it.within_seconds:g} s of its "
                    f"weight update ({it.because})",
                }[was]
                logger.warning("rolecall did not replace rollout replica %s (%s): %s", it.replica, it.key, it.because)
                if was == STARTED:
                    self._discard(it.new)

    def _fail(self, it: Replacement, because: str) -> None:
        with self._lock:
            if it.is_under_way:
                it.phase, it.because = FAILED, because
        logger.warning("rolecall did not replace rollout replica %s (%s): %s", it.replica, it.key, because)

    def _discard(self, replica: Any) -> None:
        self._run(lambda: self._end_quietly(replica))

    def _end_quietly(self, replica: Any) -> None:
        try:
            self._cluster.end(replica)
        except Exception as e:  # noqa: BLE001 nobody waits for it
            logger.warning("rolecall could not end an engine that nobody uses: %s: %s", type(e).__name__, e)

    def _refusal(self, manager: Any, replica: Any) -> str:
        """Why this replica cannot be replaced alone. Empty: it can."""
        mode = _mode(replica)
        if mode != STANDALONE or manager.backend == COLOCATED:
            return f"it shares its devices with the trainer (mode {mode}), and cannot be replaced alone"
        if getattr(getattr(replica.config, "disaggregation", None), "enabled", False):
            return "its prefill and decode engines are separate, which is not supported"
        if self._route_of(replica) is None:
            return "its load balancer is not known"
        if not self._resumes(replica):
            return "its clients would not take up an interrupted request elsewhere"
        if sum(_mode(r) == STANDALONE for r in manager.replicas) < 2:
            return "no other standalone replica would take its requests"
        return ""


def _mode(replica: Any) -> str:
    mode = getattr(replica, "rollout_mode", None)
    return str(getattr(mode, "value", mode))
