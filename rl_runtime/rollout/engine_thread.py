"""The only thread that uses an engine: it steps while there are requests, and runs orders between two steps.

It also reports its phase: `generate` from the arrival of requests (progress with every step), `idle` without requests,
`wait` while it only waits for weights, `sleep` while the engine is asleep: it then takes no step, whatever requests it
has. A hang before the first request is processed is therefore visible as missing progress. A step that fails ends the
thread: the engine is then broken, every later call raises, and `on_failure` is called once.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, TypeVar

from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock
from rolecall.core.errors import DeadlineExceeded
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.exchanges import UnitOfWork
from rolecall.rl_runtime.rollout.engine import EngineBroken, NewTokens, VllmEngine

logger = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_WAIT_SECONDS: Final = 1.0
"""An idle engine wakes up this often; new work wakes it at once."""


class EngineThread:
    """Creates an engine in a dedicated thread and runs it there.

    Args:
        make: creates the engine; called in the thread.
        on_tokens: receives a step's output, in the thread; returns this rank's share of its tokens.
        on_step: called before every step, in the thread, for fault injection; a returned number scales the step's
            log-probabilities.
        on_failure: called in the thread, once, when the engine broke.
    """

    def __init__(
        self,
        make: Callable[[], VllmEngine],
        on_tokens: Callable[[list[NewTokens]], int],
        *,
        clock: Clock,
        on_step: Callable[[], float | None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._make, self._on_tokens, self._clock = make, on_tokens, clock
        self._on_step, self._on_failure = on_step, on_failure
        self._orders: deque[tuple[Callable[[VllmEngine], object], Future[object]]] = deque()
        self._wake, self._closing = threading.Event(), False
        self._started: Future[VllmEngine] = Future()
        self.failure: BaseException | None = None
        self._phase = Phase.START
        self._phase_lock = threading.Lock()
        self._resting = False
        self.awaits_weights = False
        self.asleep = False
        """Set by an order: no steps from then on."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def wait_started(self, seconds: float) -> VllmEngine:
        """The engine once it runs. Other threads may read it, but must use `call` for calls.

        Raises:
            EngineBroken: it did not start.
            DeadlineExceeded: not within `seconds`.
        """
        try:
            return self._started.result(seconds)
        except TimeoutError:
            raise DeadlineExceeded(waited_for="the engine to start", seconds=seconds) from None

    def post(self, order: Callable[[VllmEngine], object]) -> Future[object]:
        """Runs `order` between two steps, in the order of posting. Raises EngineBroken: the engine has failed."""
        if self.failure is not None:
            raise EngineBroken(f"the engine failed: {type(self.failure).__name__}: {self.failure}")
        done: Future[object] = Future()
        self._orders.append((order, done))
        self._wake.set()
        if self.failure is not None:  # it failed between the check and the append: no thread will run the order
            self._refuse_orders()
        return done

    def post_requests(self, num_requests: int, order: Callable[[VllmEngine], object]) -> None:
        """Posts an order that adds requests: from now on this process must make progress.

        Raises:
            EngineBroken: the engine has failed.
        """
        with self._phase_lock:
            # While it runs an order or a step, the thread reports its phase itself and runs this order next.
            if self._resting and not self.asleep:
                self._resting = False
                self._enter(Phase.GENERATE)
                reporter.update(requests_active=num_requests)
        self.post(order)

    def call(self, order: Callable[[VllmEngine], T], seconds: float, what: str) -> T:
        """Like `post`, but waits for the result.

        Raises:
            DeadlineExceeded: no result within `seconds`: a step or the order hangs.
            EngineBroken: the engine has failed.
        """
        done = self.post(order)
        try:
            return done.result(seconds)  # type: ignore[return-value]  # a Future[object] per order: its result is a T
        except TimeoutError:
            done.cancel()  # cancels it if it has not begun
            raise DeadlineExceeded(waited_for=f"the engine thread to {what}", seconds=seconds) from None

    def close(self, seconds: float = 5.0) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)

    # The methods below run in the engine thread.

    def _run(self) -> None:
        # This thread does the work of the start, too: what it waits for a CPU must not count as a hang.
        reporter.enter_phase(Phase.START)
        try:
            engine = self._make()
        except Exception as e:  # noqa: BLE001 deliberate: raised in the caller
            self.failure = e
            self._started.set_exception(e)
            self._refuse_orders()
            return
        self._started.set_result(engine)
        try:
            while not self._closing:
                self._obey(engine)
                if engine.num_in_flight and not self.asleep:
                    self._step(engine)
                else:
                    self._rest()
                    self._wake.wait(IDLE_WAIT_SECONDS)
                self._wake.clear()
            engine.close()
        except Exception as e:  # deliberate: a broken engine must be reported, not vanish with its thread
            self.failure = e
            logger.exception("the engine failed")
            reporter.exception(e)
            if self._on_failure is not None:
                self._on_failure(e)
        finally:
            self._refuse_orders()

    def _refuse_orders(self) -> None:
        while self._orders:
            _, done = self._orders.popleft()
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineBroken(f"the engine is gone: {self.failure or 'closed'}"))

    def _obey(self, engine: VllmEngine) -> None:
        while self._orders:
            order, done = self._orders.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            with self._phase_lock:
                self._resting = False  # from here on the order reports the phase
            try:
                done.set_result(order(engine))
            except Exception as e:  # noqa: BLE001 deliberate: raised in the caller
                done.set_exception(e)

    def _step(self, engine: VllmEngine) -> None:
        self._enter(Phase.GENERATE)
        unit = UnitOfWork(self._clock)
        factor = self._on_step() if self._on_step is not None else None
        made = engine.step()
        if factor is not None:
            made = [replace(m, logprobs=tuple(factor * (1.0 - logprob) for logprob in m.logprobs)) for m in made]
        unit.done(self._on_tokens(made))
        reporter.update(requests_active=engine.num_in_flight)

    def _rest(self) -> None:
        with self._phase_lock:
            if self._orders:
                return  # posted since the last check
            if self._phase in (Phase.START, Phase.GENERATE):
                reporter.update(requests_active=0)
            self._enter(Phase.SLEEP if self.asleep else Phase.WAIT if self.awaits_weights else Phase.IDLE)
            self._resting = True

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            reporter.enter_phase(phase)
