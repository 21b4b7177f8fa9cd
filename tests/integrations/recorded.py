"""A reporter that records, and a clock that is set."""

from typing import Any


class Recorded:
    """What is reported, in order, as `(call, value)`."""

    def __init__(self, started: bool = False) -> None:
        self.started = started
        self.calls: list[tuple[str, Any]] = []
        self.fails = False

    def _record(self, call: str, value: Any) -> None:
        if self.fails:
            raise OSError("no page")
        self.calls.append((call, value))

    def of(self, call: str) -> list[Any]:
        return [value for name, value in self.calls if name == call]

    @property
    def phases(self) -> list[str]:
        return self.of("phase")

    def start(self, *, source: str, **identity: Any) -> None:
        assert source == "integration"
        self.started = True
        self._record("start", identity)

    def is_started(self) -> bool:
        return self.started

    def enter_phase(self, name: str) -> None:
        self._record("phase", name)

    def set_step(self, n: int) -> None:
        self._record("step", n)

    def progress(self, units: int = 1, *, busy_seconds: float = 0.0) -> None:
        self._record("progress", (units, busy_seconds))

    def finish_step(self, n: int, phase: str, *, busy_seconds: float = 0.0, **more: float) -> None:
        self.set_step(n)
        self.progress(1, busy_seconds=busy_seconds)
        self.enter_phase(phase)

    def exchange(self) -> None:
        self._record("exchange", None)

    def update(self, **values: float | None) -> None:
        self._record("update", {name: value for name, value in values.items() if value is not None})

    def health(self, **signs: float | None) -> None:
        self._record("health", {name: value for name, value in signs.items() if value is not None})

    def exception(self, exc: BaseException) -> None:
        self._record("exception", exc)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
