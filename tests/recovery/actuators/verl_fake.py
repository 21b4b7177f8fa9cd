"""A verl job with rolecall's plugin, in memory: replicas, engines, orders by key. `reply` answers calls as HTTP would."""

import json
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from rolecall.recovery.actuators.calls import Call, HttpCall, Reply
from tests.recovery.actuators.driving import NOW

PHASES = ("waiting", "starting", "started", "joining", "serving")


@dataclass
class Engine:
    pid: int
    started_at: float = NOW - 60
    alive: bool = True


@dataclass
class FakeVerl:
    """`ended`: engines that orders have ended, by their PID."""

    engines: dict[int, Engine]
    colocated: set[int] = field(default_factory=set)
    orders: dict[str, list[object]] = field(default_factory=dict)  # key -> [replica, instance, phase number, because]
    ended: list[int] = field(default_factory=list)
    next_pid: int = 500

    def restart(self, replica: int) -> None:
        """The job itself has started a new engine for it."""
        self.engines[replica] = Engine(self._pid(), NOW + 1000)

    def _pid(self) -> int:
        self.next_pid += 1
        return self.next_pid

    def instance(self, replica: int) -> str:
        return f"engine-{self.engines[replica].pid}"

    def reply(self, call: Call) -> Reply:
        assert isinstance(call, HttpCall)
        path = urlsplit(call.url).path
        if path == "/v1/replicas":
            return _ok({"replicas": [self._entry(n) for n in sorted(self.engines)]})
        key = unquote(path.removeprefix("/v1/replacements/"))
        if call.method == "PUT":
            return self._order(key, call.body["replica"], call.body["instance"])
        if key not in self.orders:
            return Reply(status=404, text='{"error": "unknown"}')
        return self._go_on(key)

    def _entry(self, replica: int) -> dict[str, object]:
        engine = self.engines[replica]
        shares = replica in self.colocated
        process = {
            "pid": engine.pid,
            "started_at": engine.started_at,
            "alive": engine.alive,
            "server": True,
            "host": "",
        }
        return {
            "replica": replica,
            "mode": "hybrid" if shares else "standalone",
            "instance": self.instance(replica),
            "state": "serving",
            "refusal": "it shares its devices with the trainer" if shares else "",
            "processes": [process],
        }

    def _order(self, key: str, replica: int, instance: str) -> Reply:
        if key not in self.orders:
            if replica in self.colocated or self.instance(replica) != instance:
                return Reply(status=409, text='{"error": "another engine runs"}')
            self.orders[key] = [replica, instance, 0, ""]
        return self._state(key)

    def _go_on(self, key: str) -> Reply:
        """Each look finds the job one phase further."""
        order = self.orders[key]
        replica, instance, number, _ = order
        assert isinstance(replica, int) and isinstance(number, int)
        if number == 0 and self.instance(replica) != instance:
            order[2], order[3] = -1, "another engine runs by now"
        elif 0 <= number < len(PHASES) - 1:
            order[2] = number + 1
            if number == 0:
                self.ended.append(self.engines[replica].pid)
                self.engines[replica] = Engine(self._pid(), NOW + 100)
        return self._state(key)

    def _state(self, key: str) -> Reply:
        replica, _, number, because = self.orders[key]
        assert isinstance(number, int)
        name = "failed" if number < 0 else PHASES[number]
        return _ok({"key": key, "replica": replica, "phase": name, "because": because or name})


def _ok(body: object) -> Reply:
    return Reply(status=200, text=json.dumps(body))
