"""Reports of an engine's thread on its state page, above all while it hangs."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rolecall.agent.processes.state_pages import PageState, parse_page
from rolecall.agent.reporter import reporter
from rolecall.core.clock import SystemClock
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.rollout.engine_thread import EngineThread
from tests.support import PATIENCE_SECONDS, eventually


class Engine:
    """Requests of one step each."""

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.gate = threading.Event()
        self.gate.set()

    def add(self) -> None:
        assert self.gate.wait(PATIENCE_SECONDS)
        self.num_in_flight += 1

    def refuse(self) -> None:
        assert self.gate.wait(PATIENCE_SECONDS)
        raise ValueError("no such token")

    def step(self) -> list[Any]:
        self.num_in_flight -= 1
        return []

    def close(self) -> None:
        pass


def page() -> PageState:
    return parse_page(reporter.page_bytes())


def owes() -> bool:
    return page().phase == Phase.GENERATE and page().requests_active == 2


def rests() -> bool:
    return page().phase == Phase.IDLE and page().requests_active == 0


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def thread(engine: Engine) -> Iterator[EngineThread]:
    reporter.update(requests_active=3)  # as an engine of another test in this process may have left it
    thread = EngineThread(lambda: engine, len, clock=SystemClock())  # type: ignore[arg-type,return-value]
    thread.wait_started(PATIENCE_SECONDS)
    eventually(rests, "the engine to rest")
    yield thread
    engine.gate.set()
    thread.close()


def test_the_start_is_the_work_of_its_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter._page, "work_ident", 0)  # as in a process that has made no progress yet
    begun, go_on = threading.Event(), threading.Event()

    def make() -> Engine:
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return engine

    thread = EngineThread(make, len, clock=SystemClock())  # type: ignore[arg-type]
    assert begun.wait(PATIENCE_SECONDS)
    assert (page().phase, page().work_tid) == (Phase.START, thread._thread.native_id)
    go_on.set()
    thread.wait_started(PATIENCE_SECONDS)
    thread.close()


def test_requests_are_owed_before_the_thread_has_come_to_them(engine: Engine, thread: EngineThread) -> None:
    entries = page().phase_entries
    engine.gate.clear()
    thread.post_requests(2, lambda _: engine.add())
    assert owes(), "a hang before its first step is not visible as missing progress"
    assert page().phase_entries == entries + 1, "what it owes is counted from now, not from when it began to rest"
    engine.gate.set()
    eventually(rests, "the request to be done")


def test_an_engine_that_sleeps_takes_no_step_and_owes_nothing(engine: Engine, thread: EngineThread) -> None:
    def sleep(_: Any) -> None:
        thread.asleep = True

    def wake(_: Any) -> None:
        thread.asleep = False

    thread.call(sleep, PATIENCE_SECONDS, "fall asleep")
    eventually(lambda: page().phase == Phase.SLEEP, "the engine to report its sleep")
    thread.post_requests(2, lambda _: engine.add())
    thread.call(lambda _: None, PATIENCE_SECONDS, "take the requests")
    eventually(lambda: page().phase == Phase.SLEEP and engine.num_in_flight == 1, "it to sleep on")
    thread.call(wake, PATIENCE_SECONDS, "wake up")
    eventually(lambda: rests() and engine.num_in_flight == 0, "the requests to be done")


def test_requests_that_the_engine_refuses_are_dropped(engine: Engine, thread: EngineThread) -> None:
    engine.gate.clear()
    thread.post_requests(2, lambda _: engine.refuse())
    assert owes()
    engine.gate.set()
    eventually(rests, "the engine to rest again")
