"""The fake clock advances only on request; the system clock advances by itself."""

from rolecall.core.clock import Clock, FakeClock, SystemClock


def test_the_fake_clock_advances_both_times_by_the_sleep() -> None:
    clock: Clock = FakeClock(now=10.0, wall_offset=1000.0)
    assert (clock.monotonic(), clock.wall()) == (10.0, 1010.0)
    clock.sleep(2.5)
    assert (clock.monotonic(), clock.wall()) == (12.5, 1012.5)


def test_the_fake_clock_never_goes_back() -> None:
    clock = FakeClock()
    before = clock.monotonic()
    clock.advance(-5.0)
    assert clock.monotonic() == before


def test_the_system_clock_goes_forward() -> None:
    clock = SystemClock()
    before = clock.monotonic()
    clock.sleep(0.0)
    assert clock.monotonic() >= before
    assert clock.wall() > 1_700_000_000
