"""Where verl is touched so that standalone rollout replicas can be replaced, and what is asked of Ray for it.

    verl                                          what is added
    CheckpointEngineManager.update_weights        the only moment at which the job's replicas change
    LLMServerManager._init_global_load_balancer   each replica knows its balancer, and the actor that keeps the lists of
                                                  servers: weights may be sent from another process
    LLMServerManager.get_client                   whether its clients take up an interrupted request elsewhere
    LLMServerClient.generate, _acquire_server     where they do: an engine that is gone has interrupted the request, and
                                                  gets no further ones. verl's own client raises, and the sample is
                                                  lost, or the job ends

Nothing is touched unless the environment names an address (verl_control.py). Standard library only.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rolecall.integrations.after_import import AfterImport
from rolecall.integrations.verl_control import Control, control_of
from rolecall.integrations.verl_replacements import Replacements

logger = logging.getLogger(__name__)

ROUTE, RESUMES = "_rolecall_route", "_rolecall_resumes"
"""Attributes of verl's replicas; they travel with them to the process that sends the weights."""
ABORT_SECONDS = 5.0
"""For an engine that is slow to give its requests back; one that hangs does not."""
RETURN_SECONDS = 1.0
"""For the requests that it gave back to reach their clients."""
END_SECONDS = 60.0
"""For Ray to end processes and to free their devices."""
POLL_SECONDS = 0.2
CALL_SECONDS = 10.0
"""Of each call to the balancer, or to the process that keeps the list of servers: the trainer waits for a few."""
INTERRUPTIONS_MAX = 120
"""Of one request, one a second (verl's client waits between two), until the engine's end is an error of the job."""


def install(environ: Mapping[str, str]) -> None:
    """Once a process, before verl's other modules are imported. Does nothing unless the environment asks for it."""
    control = control_of(environ)
    if control is None:
        return
    AfterImport(
        {
            "verl.checkpoint_engine.base": functools.partial(_wrap_updates, control=control),
            "verl.workers.rollout.llm_server": _wrap_servers,
        }
    ).install()


# --- weight updates ---------------------------------------------------------------------------------------------------


def _wrap_updates(module: ModuleType, control: Control) -> None:
    managers: Any = module.CheckpointEngineManager
    # verl decides by the frame of the caller whether to return a coroutine: its decorator comes outside of ours.
    original = getattr(managers.update_weights, "__wrapped__", None)
    if original is None or not inspect.iscoroutinefunction(original):
        raise TypeError("CheckpointEngineManager.update_weights is not what this version of rolecall knows")
    replacements = Replacements(RayCluster(), route_of, resumes, time.monotonic, _in_a_thread)

    @functools.wraps(original)
    async def update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        control.serve(replacements)
        await replacements.before_update(self)
        try:
            done = await original(self, *args, **kwargs)
        except BaseException as e:
            replacements.update_failed(self, e)
            raise
        await replacements.after_update(self)
        return done

    managers.update_weights = module.auto_await(update_weights)


def _in_a_thread(act: Callable[[], None]) -> None:
    threading.Thread(target=act, name="rolecall-replace", daemon=True).start()


# --- servers and their balancer ---------------------------------------------------------------------------------------

_managers: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""verl's managers of servers in this process."""


@dataclass(frozen=True, slots=True, eq=False)
class RayRoute:
    """`balancer`: verl's actor; `keeper`: the actor in which its manager of servers lives, None for the driver."""

    balancer: Any
    keeper: Any

    async def remove(self, replica: Any) -> None:
        address = replica.server_address
        known = await self._ask(self.balancer.get_all_servers)
        if not set(known) - {address}:
            raise LookupError("no other server gets requests")
        await self._ask(self.balancer.remove_servers, server_ids=[address])
        try:
            await self._keep(forget, replica)
        except BaseException:
            if address in known:
                await self._ask(self.balancer.add_servers, servers={address: replica.server_handle})
            raise

    async def add(self, replica: Any) -> None:
        await self._keep(adopt, replica)
        await self._ask(self.balancer.add_servers, servers={replica.server_address: replica.server_handle})

    async def _ask(self, method: Any, **arguments: Any) -> Any:
        return await asyncio.wait_for(method.remote(**arguments), CALL_SECONDS)

    async def _keep(self, change: Callable[[Any, str, Any], None], replica: Any) -> None:
        name = actor_id(self.balancer)
        if managers_of(name):
            change(None, name, replica)
        elif self.keeper is not None:
            await asyncio.wait_for(self.keeper.__ray_call__.remote(change, name, replica), CALL_SECONDS)
        else:
            raise LookupError("the process that keeps the list of servers is not known")


def route_of(replica: Any) -> RayRoute | None:
    return getattr(replica, ROUTE, None)


def resumes(replica: Any) -> bool:
    return getattr(replica, RESUMES, False) is True


def managers_of(balancer: str) -> list[Any]:
    """Of the balancer with this id, in this process."""
    return [m for m in list(_managers) if actor_id(m.global_load_balancer) == balancer]


def forget(actor: Any, balancer: str, replica: Any) -> None:
    """In the process that keeps the lists of servers."""
    for manager in managers_of(balancer):
        for known in [r for r in manager.rollout_replicas if r.replica_rank == replica.replica_rank]:
            manager.rollout_replicas.remove(known)
            if known.server_address in manager.server_addresses:
                at = manager.server_addresses.index(known.server_address)
                del manager.server_addresses[at], manager.server_handles[at]
    _count_again(actor)


def adopt(actor: Any, balancer: str, replica: Any) -> None:
    """In the process that keeps the lists of servers. A replica that is there already is not added again."""
    for manager in managers_of(balancer):
        if any(r.replica_rank == replica.replica_rank for r in manager.rollout_replicas):
            continue
        manager.rollout_replicas.append(replica)
        manager.server_addresses.append(replica.server_address)
        manager.server_handles.append(replica.server_handle)
    _count_again(actor)


def _count_again(actor: Any) -> None:
    """verl's fully asynchronous rollouter limits its samples by the number of replicas."""
    count = getattr(actor, "_update_max_concurrent_samples", None)
    if count is not None:
        count()


def _wrap_servers(module: ModuleType) -> None:
    _wrap_manager(module.LLMServerManager)
    _wrap_client(module)


def _wrap_manager(managers: Any) -> None:
    begin, get_client = managers._init_global_load_balancer, managers.get_client

    @functools.wraps(begin)
    async def _init_global_load_balancer(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = await begin(self, *args, **kwargs)
        _safely(_know, self)
        return done

    @functools.wraps(get_client)
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        client = get_client(self, *args, **kwargs)
        _safely(_know_client, self, client)
        return client

    managers._init_global_load_balancer = _init_global_load_balancer
    managers.get_client = get


def _know(manager: Any) -> None:
    _managers.add(manager)
    try:
        keeper = sys.modules["ray"].get_runtime_context().current_actor
    except Exception:  # noqa: BLE001 the driver is no actor
        keeper = None
    for replica in manager.rollout_replicas:
        setattr(replica, ROUTE, RayRoute(manager.global_load_balancer, keeper))


def _know_client(manager: Any, client: Any) -> None:
    does = _takes_up(client)
    for replica in manager.rollout_replicas:
        setattr(replica, RESUMES, does and getattr(replica, RESUMES, True))


# --- clients ----------------------------------------------------------------------------------------------------------

_acquired: contextvars.ContextVar[list[str]] = contextvars.ContextVar("rolecall_acquired")


def _takes_up(client: Any) -> bool:
    """Whether it asks another server to go on after `stop_reason="aborted"`."""
    return any(c.__name__ == "FullyAsyncLLMServerClient" for c in type(client).__mro__)


def _wrap_client(module: ModuleType) -> None:
    clients, output = module.LLMServerClient, module.TokenOutput
    generate, acquire = clients.generate, clients._acquire_server

    @functools.wraps(acquire)
    async def _acquire_server(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = await acquire(self, *args, **kwargs)
        names = _acquired.get(None)
        if names is not None:
            names.append(found[0])
        return found

    @functools.wraps(generate)
    async def resumed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _takes_up(self):
            return await generate(self, *args, **kwargs)
        names: list[str] = []
        token = _acquired.set(names)
        try:
            done = await generate(self, *args, **kwargs)
        except sys.modules["ray"].exceptions.RayActorError as e:
            if not names or not await _interrupted(self, str(kwargs.get("request_id", args[:1])), names[-1], e):
                raise
            return output(token_ids=[], log_probs=[], stop_reason="aborted")
        finally:
            _acquired.reset(token)
        _interruptions(self).pop(str(kwargs.get("request_id", args[:1])), None)
        return done

    clients._acquire_server = _acquire_server
    clients.generate = resumed


def _interruptions(client: Any) -> dict[str, int]:
    """Request -> how many engines in a row ended under it."""
    found: dict[str, int] = client.__dict__.setdefault("_rolecall_interruptions", {})
    return found


async def _interrupted(client: Any, request: str, server: str, error: Exception) -> bool:
    """Whether another server may go on with the request. The one that is gone gets no further ones, unless it is the
    last. Never raises an Exception."""
    counted = _interruptions(client)
    counted[request] = counted.get(request, 0) + 1
    if counted[request] > INTERRUPTIONS_MAX:
        del counted[request]
        return False
    try:
        balancer = client._load_balancer
        if getattr(error, "actor_id", None) == actor_id(balancer):
            return False
        if isinstance(error, sys.modules["ray"].exceptions.ActorDiedError):  # others may be back
            known = await asyncio.wait_for(balancer.get_all_servers.remote(), CALL_SECONDS)
            if server in known and len(known) > 1:
                logger.warning("rolecall: rollout engine %s is gone; its requests go on elsewhere", server)
                await asyncio.wait_for(balancer.remove_servers.remote(server_ids=[server]), CALL_SECONDS)
    except Exception as e:  # noqa: BLE001 the request fails as it would have failed
        logger.warning("rolecall could not lead a request elsewhere: %s: %s", type(e).__name__, e)
        return False
    return True


# --- Ray --------------------------------------------------------------------------------------------------------------


def actor_id(handle: Any) -> str:
    return str(handle._actor_id.hex())


class RayCluster:
    """As `verl_replacements.Cluster`."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}  # id of a node of Ray -> names of its host

    def instance(self, replica: Any) -> str:
        return "-".join(actor_id(server) for server in replica.servers)

    def processes(self, replica: Any) -> list[dict[str, Any]]:
        return [
            self._process(actor, server=is_server)
            for actors, is_server in ((replica.servers, True), (replica.workers, False))
            for actor in actors
        ]

    def _process(self, actor: Any, *, server: bool) -> dict[str, Any]:
        """From Ray's own table, so that one that hangs is told, too."""
        known = _actor(actor)
        address = known.get("Address") or {}
        return {
            "pid": int(known.get("Pid") or 0),
            "host": str(address.get("IPAddress") or ""),
            "names": self._names_of(str(address.get("NodeID") or "")),
            "started_at": float(known.get("StartTime") or 0) / 1000,
            "alive": _is_alive(known),
            "server": server,
        }

    def _names_of(self, node: str) -> list[str]:
        """Ray's names of the host of this node; none: it is not known."""
        if node and node not in self._names:
            for one in sys.modules["ray"].nodes():
                names = [one.get(key) for key in ("NodeManagerHostname", "NodeName", "NodeManagerAddress")]
                self._names[str(one.get("NodeID"))] = list(dict.fromkeys(str(name) for name in names if name))
        return self._names.get(node, [])

    def end(self, replica: Any) -> None:
        try:
            asyncio.run(asyncio.wait_for(replica.abort_all_requests(reject_request=True), ABORT_SECONDS))
            time.sleep(RETURN_SECONDS)
        except Exception as e:  # noqa: BLE001 it hangs or is gone
            logger.warning("rolecall: the engine gives no requests back: %s: %s", type(e).__name__, e)
        self._end_processes(replica)

    def _end_processes(self, replica: Any) -> None:
        """Raises TimeoutError: they are still there, or their devices are not free."""
        ray = sys.modules["ray"]
        actors = [*replica.servers, *replica.workers]
        for actor in actors:
            ray.kill(actor, no_restart=True)
        groups = list(getattr(replica.resource_pool, "pgs", None) or ())
        for group in groups:
            ray.util.remove_placement_group(group)
        ends_at = time.monotonic() + END_SECONDS
        while any(_is_alive(_actor(a)) for a in actors) or any(not _is_removed(g) for g in groups):
            if time.monotonic() > ends_at:
                raise TimeoutError(f"its processes, or their devices, are not free after {END_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def start(self, old: Any) -> Any:
        ends_at = time.monotonic() + END_SECONDS
        while True:
            new = type(old)(
                replica_rank=old.replica_rank,
                config=old.config,
                model_config=old.model_config,
                gpus_per_node=old.gpus_per_node,
            )
            try:
                asyncio.run(new.init_standalone())
                break
            except Exception as e:  # whatever verl, vLLM or Ray raise: nothing of it may be left; it is raised again
                self._clear(new)
                # Ray frees the devices of processes that have ended a moment later.
                if not (isinstance(e, ValueError) and "available" in str(e)) or time.monotonic() > ends_at:
                    raise
                time.sleep(POLL_SECONDS)
        setattr(new, ROUTE, route_of(old))
        setattr(new, RESUMES, resumes(old))
        return new

    def _clear(self, replica: Any) -> None:
        try:
            self._end_processes(replica)
        except Exception as e:  # noqa: BLE001 the reason is raised by the caller
            logger.warning("rolecall could not end what it had started: %s: %s", type(e).__name__, e)


def _actor(handle: Any) -> dict[str, Any]:
    """What Ray's table has of it; empty: nothing."""
    return dict(sys.modules["ray"]._private.state.actors(actor_id(handle)))


def _is_alive(known: Mapping[str, Any]) -> bool:
    return bool(known) and known.get("State") != "DEAD"


def _is_removed(group: Any) -> bool:
    found = sys.modules["ray"].util.placement_group_table(group)
    return not found or found.get("state") == "REMOVED"


def _safely(act: Callable[..., None], *args: Any) -> None:
    try:
        act(*args)
    except Exception as e:  # noqa: BLE001 the job goes on; what is not known is not replaced
        logger.warning("rolecall could not learn of verl's servers: %s: %s", type(e).__name__, e)
