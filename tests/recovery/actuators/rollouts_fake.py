"""Rollout engines of slime and NeMo-RL as processes of this host, and the monitors that bring them back, written from
the documentation of both: slime's `docs/en/advanced/fault-tolerance.md` and `slime/utils/health_monitor.py` (the version
whose probe has no deadline), NeMo-RL's page "Generation Fault Tolerance (SingleController)".

A caller makes each round of a monitor and each weight update, so that nothing happens between two steps of a test.
"""

import os
import select
import subprocess
import sys
from pathlib import Path

from rolecall.core.ids import process_start_ticks
from rolecall.core.proc_stat import read_stat
from rolecall.node.end_process import end_process
from rolecall.recovery.actuators.targets.target import Member
from tests.support import PATIENCE_SECONDS

PYTHON = (sys.executable, "-I", "-S", "-c")
CORE = """
import fcntl, signal, sys
signal.alarm(600)  # however the tests end
gpu = open(sys.argv[1], "a")
fcntl.flock(gpu, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("loaded", flush=True)
signal.pause()
"""
SERVER = """
import signal, subprocess, sys, threading, time
python, core, gpu, ignores_sigterm = sys.argv[1:]
wedged = []
signal.signal(signal.SIGUSR1, lambda *_: wedged.append(True))
if ignores_sigterm:
    signal.signal(signal.SIGTERM, lambda *_: None)
below = subprocess.Popen(
    [python, "-I", "-S", "-c", core, gpu], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
)
if not below.stdout.readline():
    sys.exit("no memory left on the GPU")
version = tokens = 0
def generate():
    global tokens
    while not wedged:
        time.sleep(0.005)
        tokens += 1
print(below.pid, 0, flush=True)
for line in sys.stdin:
    asked, value = line.split()
    if asked == "load":
        if not version:
            threading.Thread(target=generate, daemon=True).start()
        version = int(value)
    before = tokens
    while asked == "generate" and tokens == before:
        time.sleep(0.002)
    print(version, tokens, flush=True)
below.kill()
"""


class Gone(Exception):
    """The engine has ended."""


class Engine:
    """A server in a process group of its own. Its core holds the GPU, and outlives a server that is killed. It generates
    from the first weights on; SIGUSR1 stops that, while it still answers."""

    def __init__(self, gpu: Path, *, ignores_sigterm: bool = False) -> None:
        self._process = subprocess.Popen(
            [*PYTHON, SERVER, sys.executable, CORE, str(gpu), "yes" if ignores_sigterm else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._process.pid
        self.start_ticks = _ticks(self.pid)
        self._core: tuple[int, int] | None = None  # PID, start ticks
        self._answers_due, self._text = 1, b""

    def has_loaded(self, seconds: float = PATIENCE_SECONDS) -> bool:
        """Raises Gone: it could not."""
        if self._core is None:
            answer = self._answer(seconds)
            if answer is None:
                return False
            self._core = answer[0], _ticks(answer[0])
        return True

    def ask(self, asked: str, value: int = 0, seconds: float | None = None) -> tuple[int, int] | None:
        """(weight version, tokens so far). None: no answer within `seconds`. Raises Gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{asked} {value}\n".encode())
        except BrokenPipeError:
            raise Gone from None
        self._answers_due += 1
        return self._answer(seconds)

    def _answer(self, seconds: float | None) -> tuple[int, int] | None:
        assert self._process.stdout is not None
        line = b""
        while self._answers_due:  # to earlier questions, too
            while b"\n" not in self._text:
                if not select.select([self._process.stdout], [], [], seconds)[0]:
                    return None
                part = os.read(self._process.stdout.fileno(), 4096)
                if not part:
                    raise Gone
                self._text += part
            line, _, self._text = self._text.partition(b"\n")
            self._answers_due -= 1
        version, tokens = map(int, line.split())
        return version, tokens

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def holds_its_gpu(self) -> bool:
        if self._core is None:
            return False
        pid, start_ticks = self._core
        stat = read_stat(pid)
        return stat is not None and stat.start_ticks == start_ticks and not stat.has_ended

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)
        if self._core is not None:
            end_process(*self._core)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class Rollouts:
    """`engines`: by replica, rollout/0 first; None: an empty slot. `incarnations`: as a watch counts them."""

    def __init__(self, folder: Path, num_engines: int, *, ignores_sigterm: bool = False) -> None:
        self._folder, self._ignores_sigterm = folder, ignores_sigterm
        self._started: list[Engine] = []
        self.incarnations = [0] * num_engines
        self.engines: list[Engine | None] = [None] * num_engines
        self.version = 0

    def start(self, n: int) -> Engine:
        engine = Engine(self._folder / f"gpu-{n}", ignores_sigterm=self._ignores_sigterm)
        self._started.append(engine)
        self.incarnations[n] += 1
        self.engines[n] = engine
        return engine

    def engine(self, n: int) -> Engine:
        engine = self.engines[n]
        assert engine is not None, f"slot {n} is empty"
        return engine

    def member(self, n: int) -> Member:
        engine = self.engine(n)
        return Member(replica=f"rollout/{n}", rank=0, node="node-1", pid=engine.pid, start_ticks=engine.start_ticks)

    def members(self) -> list[tuple[int, Member]]:
        """(incarnation, process) of all that run, as the watch's agents tell them."""
        return [
            (self.incarnations[n], self.member(n))
            for n, engine in enumerate(self.engines)
            if engine is not None and engine.exit_code is None
        ]

    def pids(self) -> dict[int, int]:
        """Of the engines that run, by replica."""
        return {n: e.pid for n, e in enumerate(self.engines) if e is not None and e.exit_code is None}

    def close(self) -> None:
        for engine in self._started:
            engine.close()


class Slime(Rollouts):
    """`fault_tolerance`: `--use-fault-tolerance`. `asked`: the engine that the health monitor waits for."""

    def __init__(self, folder: Path, num_engines: int, *, fault_tolerance: bool = True, **options: bool) -> None:
        super().__init__(folder, num_engines, **options)
        self._fault_tolerance = fault_tolerance
        self.asked: int | None = None
        self.update_weights()

    def check_health(self) -> None:
        """One round of `RolloutHealthMonitor`: each engine in turn generates a token, with no deadline for the call; one
        that fails leaves an empty slot."""
        for n, engine in enumerate(self.engines if self._fault_tolerance else []):
            self.asked = n
            try:
                if engine is not None:
                    engine.ask("generate")
            except Gone:
                self.engines[n] = None
        self.asked = None

    def update_weights(self) -> None:
        """`RolloutServer.recover()` fills the empty slots and waits for them; then every engine gets the weights."""
        for engine in [self.start(n) for n, engine in enumerate(self.engines) if engine is None]:
            assert engine.has_loaded()
        self.version += 1
        for n in range(len(self.engines)):
            self.engine(n).ask("load", self.version)


class NemoRl(Rollouts):
    """The fleet-health ledger of the SingleController and the supervisor of `restart_dead_shards`. `history`: (shard,
    its new state)."""

    UNHEALTHY_THRESHOLD = 3
    SERVING = ("HEALTHY", "SUSPECT")

    def __init__(
        self,
        folder: Path,
        num_engines: int,
        *,
        restart_dead_shards: bool = True,
        max_restart_attempts_per_shard: int = 5,
        **options: bool,
    ) -> None:
        super().__init__(folder, num_engines, **options)
        self._restarts, self._attempts_max = restart_dead_shards, max_restart_attempts_per_shard
        self._failures, self._attempts = [0] * num_engines, [0] * num_engines
        self.states = ["STALE"] * num_engines
        self.history: list[tuple[int, str]] = []
        for n in range(num_engines):
            assert self.start(n).has_loaded()
        self.refit()
        self.history.clear()

    def tick(self) -> None:
        """Probes the shards that serve, and takes each one that does not one step further. No restart is awaited."""
        for n, state in enumerate(self.states):
            if state in self.SERVING:
                self._probe(n)
            elif state == "DEAD" and self._restarts:
                self._restart(n)
            elif state == "RESTARTING":
                try:
                    if self.engine(n).has_loaded(0.0):
                        self._to(n, "STALE")
                except Gone:
                    self._to(n, "DEAD")

    def refit(self) -> None:
        """Gives the weights to all shards that are present, which makes a stale one serve."""
        self.version += 1
        for n, state in enumerate(self.states):
            if state in (*self.SERVING, "STALE"):
                self.engine(n).ask("load", self.version)
                self._failures[n] = 0
                self._to(n, "HEALTHY")

    def _probe(self, n: int) -> None:
        """`is_alive`, which an engine answers that generates nothing."""
        try:
            answer = self.engine(n).ask("alive", seconds=PATIENCE_SECONDS)
        except Gone:
            answer = None
        self._failures[n] = 0 if answer else self._failures[n] + 1
        if self._failures[n] >= self.UNHEALTHY_THRESHOLD:
            self._to(n, "DEAD")
        elif not answer:
            self._to(n, "SUSPECT")

    def _restart(self, n: int) -> None:
        self._attempts[n] += 1
        if self._attempts[n] > self._attempts_max:
            self._to(n, "RETIRED")
            return
        self.start(n)
        self._to(n, "RESTARTING")

    def _to(self, n: int, state: str) -> None:
        if self.states[n] != state:
            self.states[n] = state
            self.history.append((n, state))


def _ticks(pid: int) -> int:
    found = process_start_ticks(pid)
    assert found is not None
    return found
