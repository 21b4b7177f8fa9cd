"""Where verl is touched for replacements: its clients, its lists of servers, its weight updates. In stand-ins with verl's
shape; real verl: `real/test_verl.py`."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rolecall.integrations import verl_engines
from rolecall.integrations.verl_engines import INTERRUPTIONS_MAX, RayRoute, resumes, route_of
from rolecall.integrations.verl_replacements import Replacements


class RayActorError(Exception):
    def __init__(self, actor_id: str = "") -> None:
        self.actor_id = actor_id


class ActorDiedError(RayActorError): ...


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def no_actor() -> Any:
        raise RuntimeError("the driver is no actor")

    ray: Any = ModuleType("ray")
    ray.exceptions = SimpleNamespace(RayActorError=RayActorError, ActorDiedError=ActorDiedError)
    ray.get_runtime_context = no_actor
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(verl_engines, "_managers", set())
    yield


class Remote:
    """A method of an actor."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class Balancer:
    def __init__(self, *servers: str) -> None:
        self._actor_id = b"balancer"
        self.servers = dict.fromkeys(servers, "handle")
        self.get_all_servers = Remote(lambda: list(self.servers))
        self.remove_servers = Remote(lambda server_ids: [self.servers.pop(s, None) for s in server_ids])
        self.add_servers = Remote(lambda servers: self.servers.update(servers))


def replica(number: int) -> Any:
    return SimpleNamespace(replica_rank=number, server_address=f"s{number}", server_handle=f"h{number}")


class Managers:
    def __init__(self, num_replicas: int = 2) -> None:
        self.rollout_replicas = [replica(n) for n in range(num_replicas)]
        self.server_addresses = [r.server_address for r in self.rollout_replicas]
        self.server_handles = [r.server_handle for r in self.rollout_replicas]

    async def _init_global_load_balancer(self) -> None:
        self.global_load_balancer = Balancer(*self.server_addresses)

    def get_client(self, client_cls: Any) -> Any:
        return client_cls(self.global_load_balancer)


class Output(SimpleNamespace): ...


def llm_server() -> Any:
    """As verl's module of that name. `plan`: what each try of a request does: an exception, or a server's name."""

    class LLMServerClient:
        def __init__(self, balancer: Any) -> None:
            self._load_balancer = balancer
            self.plan: list[Exception | str] = []

        async def _acquire_server(self, request_id: str) -> tuple[str, str]:
            return next(iter(self._load_balancer.servers)), "handle"

        async def generate(self, request_id: str) -> Any:
            await self._acquire_server(request_id)
            step = self.plan.pop(0)
            if isinstance(step, Exception):
                raise step
            return Output(token_ids=[1], stop_reason="completed")

    class FullyAsyncLLMServerClient(LLMServerClient):
        async def generate(self, request_id: str) -> Any:
            while True:
                done = await super().generate(request_id=request_id)
                if done.stop_reason != "aborted":
                    return done

    module: Any = ModuleType("llm_server")
    module.LLMServerClient, module.FullyAsyncLLMServerClient = LLMServerClient, FullyAsyncLLMServerClient
    module.LLMServerManager, module.TokenOutput = type("LLMServerManager", (Managers,), {}), Output
    # Wrapped in place: the functions belong to this one class.
    module.LLMServerManager._init_global_load_balancer = Managers._init_global_load_balancer
    module.LLMServerManager.get_client = Managers.get_client
    verl_engines._wrap_servers(module)
    return module


def test_a_process_is_told_with_the_names_of_its_host() -> None:
    """Two hosts may have the same PID."""
    actors = {
        "a": {"Pid": 7, "State": "ALIVE", "StartTime": 5000, "Address": {"IPAddress": "10.0.0.1", "NodeID": "n"}},
        "b": {"Pid": 7, "State": "DEAD", "StartTime": 6000, "Address": {"IPAddress": "10.0.0.2", "NodeID": "m"}},
        "c": {},
    }
    nodes = [
        {
            "NodeID": "n",
            "NodeManagerHostname": "gpu-1.example",
            "NodeName": "10.0.0.1",
            "NodeManagerAddress": "10.0.0.1",
        },
        {"NodeID": "other", "NodeManagerHostname": "gpu-9"},
    ]
    asked = []
    ray: Any = sys.modules["ray"]
    ray._private = SimpleNamespace(state=SimpleNamespace(actors=lambda name: actors[name]))
    ray.nodes = lambda: asked.append(1) or nodes
    handles = [SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda name=name: name)) for name in actors]
    cluster = verl_engines.RayCluster()
    one = SimpleNamespace(servers=handles[:1], workers=handles[1:])
    found = cluster.processes(one)
    assert [(p["pid"], p["host"], p["names"], p["alive"], p["server"]) for p in found] == [
        (7, "10.0.0.1", ["gpu-1.example", "10.0.0.1"], True, True),
        (7, "10.0.0.2", [], False, False),
        (0, "", [], False, False),
    ]
    assert found[0]["started_at"] == 5.0
    num_asked = len(asked)
    cluster.processes(SimpleNamespace(servers=handles[:1], workers=[]))
    assert len(asked) == num_asked, "names of a node do not change"


def client_of(module: Any, *plan: Exception | str, servers: tuple[str, ...] = ("s0", "s1")) -> Any:
    client = module.FullyAsyncLLMServerClient(Balancer(*servers))
    client.plan = list(plan)
    return client


def ask(client: Any) -> Any:
    return asyncio.run(client.generate(request_id="r"))


def test_a_request_whose_engine_ended_goes_on_at_another_one() -> None:
    client = client_of(llm_server(), ActorDiedError("engine"), "s1")
    assert ask(client).token_ids == [1]
    assert list(client._load_balancer.servers) == ["s1"], "it gets no further ones"
    assert client._rolecall_interruptions == {}


def test_an_engine_that_is_only_away_keeps_its_place() -> None:
    client = client_of(llm_server(), RayActorError("engine"), "s0")
    assert ask(client).token_ids == [1] and list(client._load_balancer.servers) == ["s0", "s1"]


def test_the_last_engine_stays_in_the_balancer() -> None:
    client = client_of(llm_server(), *[ActorDiedError("engine")] * (INTERRUPTIONS_MAX + 1), servers=("s0",))
    with pytest.raises(ActorDiedError):
        ask(client)
    assert list(client._load_balancer.servers) == ["s0"] and client.plan == [], "asked so often, and then it fails"


def test_other_errors_are_the_jobs() -> None:
    module = llm_server()
    for error in (ActorDiedError(verl_engines.actor_id(Balancer())), RuntimeError("No available servers")):
        client = client_of(module, error, "s0")
        with pytest.raises(type(error)):
            ask(client)
    plain = module.LLMServerClient(Balancer("s0", "s1"))
    plain.plan = [ActorDiedError("engine")]
    with pytest.raises(ActorDiedError):
        asyncio.run(plain.generate(request_id="r"))
    assert list(plain._load_balancer.servers) == ["s0", "s1"], "a client that does not go on is left as it is"


def test_a_balancer_that_does_not_answer_fails_the_request_as_it_would_have_failed() -> None:
    client = client_of(llm_server(), ActorDiedError("engine"))
    client._load_balancer.get_all_servers = Remote(lambda: 1 / 0)
    with pytest.raises(ActorDiedError):
        ask(client)


def started(module: Any, client: str = "FullyAsyncLLMServerClient") -> Any:
    manager = module.LLMServerManager()
    asyncio.run(manager._init_global_load_balancer())
    manager.get_client(client_cls=getattr(module, client))
    return manager


def shown(manager: Any) -> tuple[list[int], list[str], list[str], list[str]]:
    numbers = [r.replica_rank for r in manager.rollout_replicas]
    return numbers, manager.server_addresses, manager.server_handles, list(manager.global_load_balancer.servers)


def test_replicas_know_their_balancer_and_their_clients() -> None:
    module = llm_server()
    manager = started(module)
    assert all(isinstance(route_of(r), RayRoute) and resumes(r) for r in manager.rollout_replicas)
    manager.get_client(client_cls=module.LLMServerClient)
    assert not any(resumes(r) for r in manager.rollout_replicas), "one client that does not go on is enough"
    manager.get_client(client_cls=module.FullyAsyncLLMServerClient)
    assert not any(resumes(r) for r in manager.rollout_replicas)
    assert not resumes(replica(0)) and route_of(replica(0)) is None


def test_a_replica_leaves_and_joins_the_lists() -> None:
    manager = started(llm_server())
    old = manager.rollout_replicas[0]
    route = route_of(old)
    assert route is not None
    asyncio.run(route.remove(old))
    assert shown(manager) == ([1], ["s1"], ["h1"], ["s1"])
    new = replica(0)
    new.server_address, new.server_handle = "s9", "h9"
    for _ in range(2):
        asyncio.run(route.add(new))
    assert shown(manager) == ([1, 0], ["s1", "s9"], ["h1", "h9"], ["s1", "s9"])


def test_the_only_server_is_not_removed() -> None:
    manager = started(llm_server())
    old = manager.rollout_replicas[0]
    route = route_of(old)
    assert route is not None
    manager.global_load_balancer.servers.pop("s1")
    with pytest.raises(LookupError, match="no other server gets requests"):
        asyncio.run(route.remove(old))
    assert list(manager.global_load_balancer.servers) == ["s0"]


def test_lists_in_another_process_are_changed_there() -> None:
    balancer, made = Balancer("s0", "s1"), list[Any]()
    keeper = SimpleNamespace(__ray_call__=Remote(lambda change, name, r: made.append((change, name, r.replica_rank))))
    route = RayRoute(balancer, keeper)
    asyncio.run(route.remove(replica(0)))
    asyncio.run(route.add(replica(0)))
    name = verl_engines.actor_id(balancer)
    assert made == [(verl_engines.forget, name, 0), (verl_engines.adopt, name, 0)]


def test_what_was_half_removed_is_put_back() -> None:
    for keeper in (None, SimpleNamespace(__ray_call__=Remote(lambda *_: 1 / 0))):
        balancer = Balancer("s0", "s1")
        with pytest.raises((LookupError, ZeroDivisionError)):
            asyncio.run(RayRoute(balancer, keeper).remove(replica(0)))
        assert sorted(balancer.servers) == ["s0", "s1"]


def test_a_rollouter_counts_its_replicas_again() -> None:
    manager = started(llm_server())
    counted: list[int] = []
    actor = SimpleNamespace(_update_max_concurrent_samples=lambda: counted.append(len(manager.rollout_replicas)))
    verl_engines.forget(actor, verl_engines.actor_id(manager.global_load_balancer), replica(0))
    assert counted == [1]


class Control:
    def __init__(self) -> None:
        self.served: list[Replacements] = []

    def serve(self, replacements: Replacements) -> None:
        self.served.append(replacements)


def auto_await(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))  # type: ignore[arg-type]

    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call


def checkpoint_engine() -> tuple[Any, Control]:
    class CheckpointEngineManager:
        backend = "nccl"

        def __init__(self) -> None:
            self.replicas: list[Any] = []

        @auto_await
        async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
            if global_steps is None:
                raise RuntimeError("NCCL")
            return {"sent": global_steps}

    module: Any = ModuleType("base")
    module.CheckpointEngineManager, module.auto_await = CheckpointEngineManager, auto_await
    control = Control()
    verl_engines._wrap_updates(module, control)  # type: ignore[arg-type]
    return CheckpointEngineManager, control


def test_a_weight_update_is_as_before() -> None:
    manager_class, control = checkpoint_engine()
    manager = manager_class()
    assert manager.update_weights(3) == {"sent": 3} and manager.update_weights(global_steps=4) == {"sent": 4}
    with pytest.raises(RuntimeError, match="NCCL"):
        manager.update_weights()
    assert len(control.served) == 3 and control.served[0].listing() == []


def test_a_manager_that_nobody_knows_is_left_as_it_is() -> None:
    module: Any = ModuleType("base")
    module.CheckpointEngineManager = type("CheckpointEngineManager", (), {"update_weights": lambda self: 1})
    before = module.CheckpointEngineManager.update_weights
    with pytest.raises(TypeError, match="is not what this version of rolecall knows"):
        verl_engines._wrap_updates(module, Control())  # type: ignore[arg-type]
    assert module.CheckpointEngineManager.update_weights is before
