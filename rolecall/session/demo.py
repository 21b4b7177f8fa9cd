"""The demo's job and its schedule of faults. Pure; `session.py` performs it.

A fault is injected at a seeded random moment, and the next one only after the replica serves again, so that the demo
shows one recovery at a time. Faults in quick succession are tested in `tests/e2e`, and on simulated fleets in
`tests/recovery` and `tests/rl_runtime`.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from rolecall.core.config.job import JobConfig, parse_job, read_yaml
from rolecall.core.errors import ConfigError
from rolecall.core.journal.database import redacted

DEMO_HORIZON_SECONDS = 3600.0
"""The demo's job counts as running for an hour: without a horizon, slow replicas are often tolerated."""
GAP_SECONDS = (3.0, 10.0)
"""A fault is injected this long after the fleet is healthy, uniformly at random."""
RECOVERY_DEADLINE_SECONDS = 150.0
"""A fault not resolved within this time counts as unresolved, and the demo continues with the next."""
WARM_STEPS = 8
"""Optimizer steps before the first fault: deadlines and peers' rates are learned from healthy work."""
DEMO_OF: Mapping[str, Mapping[str, Any]] = MappingProxyType({"dapo": {"at_refill_limit": "take"}})
"""The demo's settings of an algorithm. Steps continue while a fault is open and the task may be solved by then: DAPO
would find nothing more to learn and end the run."""


DEMO_MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "sync": {"roles": {"trainer": 2, "rollout": 2}, "runtime": {"nodes": 3}},
        "semi_sync": {"roles": {"trainer": 2, "rollout": 3}, "runtime": {"nodes": 5}},
    }
)
"""The demo's job in a mode with hybrids: each of them has a node, and so has each other rollout and the standby."""


def demo_job(
    *,
    seed: int,
    num_steps: int,
    injection_allowed: bool,
    settings: Sequence[str] = (),
    algorithm: str = "",
    task: str = "",
    mode: str = "",
) -> JobConfig:
    """The job of `rolecall demo`: the default job of `algorithm`, `task` and run mode in recovery mode act, changed by
    `settings`.

    Raises:
        ConfigError: a setting is not `path=value`, contradicts `algorithm`, `task` or `mode`, or makes the job invalid.
    """
    value: dict[str, Any] = {
        "name": "demo",
        "seed": seed,
        "num_steps": num_steps,
        "injection_allowed": injection_allowed,
        "recovery": {"mode": "act", "horizon_seconds": DEMO_HORIZON_SECONDS},
    }
    problems = []
    for setting in settings:
        try:
            _apply(value, setting)
        except (TypeError, ValueError) as e:
            problems.append(f"--set {setting}: {e}")
    for option, path, name in (
        ("algorithm", "algorithm.name", algorithm),
        ("task", "task.name", task),
        ("mode", "runtime.mode", mode),
    ):
        section, _, key = path.partition(".")
        given = value.setdefault(section, {})
        if name and isinstance(given, dict) and given.setdefault(key, name) != name:
            problems.append(f"--{option} {name}: --set gives {path}={given[key]}")
    runtime = value["runtime"]
    for section, own in DEMO_MODES.get(str(runtime.get("mode")) if isinstance(runtime, dict) else "", {}).items():
        given = value.setdefault(section, {})
        if isinstance(given, dict):
            value[section] = {**own, **given}
    if problems:
        raise ConfigError([redacted(p) for p in problems])
    own = value["algorithm"]
    if isinstance(own, dict):
        value["algorithm"] = {**DEMO_OF.get(str(own.get("name")), {}), **own}
    return parse_job(value, "demo")


def _apply(job: dict[str, Any], setting: str) -> None:
    path, equals, text = setting.partition("=")
    *parents, last = path.split(".")
    if not equals or not last or not all(parents):
        raise ValueError("expected path=value, as detector.window_seconds=20")
    section = job
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise TypeError(f"{parent} is not a section")
    section[last] = read_yaml(text)


def parse_faults(text: str, known: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """`rollout-kill,trainer-hang:gil` or `none`. `known`: kind -> its variants.

    Raises:
        ConfigError: names each unknown fault.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if names in ((), ("none",)):
        return ()
    problems = []
    for name in names:
        kind, colon, how = name.partition(":")
        if kind not in known:
            problems.append(f"--faults: {name}: unknown, known are {', '.join(known)} and none")
        elif colon and how not in known[kind]:
            problems.append(f"--faults: {name}: unknown, known for {kind} are {', '.join(known[kind])}")
    if problems:
        raise ConfigError(problems)
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledFault:
    """A fault to inject `gap_seconds` after the fleet is healthy; `how` if it was given as `kind:how`."""

    kind: str
    how: str | None
    seed: int
    gap_seconds: float


def scheduled_faults(seed: int, faults: Sequence[str]) -> Iterator[ScheduledFault]:
    """The faults of a run, the same for the same seed."""
    rng = random.Random(f"rolecall-demo-{seed}")
    for fault in faults:
        kind, _, how = fault.partition(":")
        yield ScheduledFault(
            kind=kind, how=how or None, seed=rng.randrange(2**31), gap_seconds=rng.uniform(*GAP_SECONDS)
        )


class DemoStage(StrEnum):
    WARMING = "warming"  # not all replicas serve yet, or too few steps
    WAITING = "waiting"  # the fleet is healthy; the fault is injected after its gap
    STRUCK = "struck"  # the injector runs; waiting for the recovery
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Input of the schedule at one tick."""

    now: float  # monotonic seconds
    step: int
    whole: bool  # every desired replica serves, no incident is open
    standbys_ready: bool
    injected: int  # number of lines in the injector's log
    injecting: bool  # a fault is not over yet
    incident_closed_at: float  # wall time of the last incident that closed, 0 if none
    injected_at: float  # wall time of the last injection, 0 if none
    restarted_at: float  # wall time of the last restart of an agent or of watch, 0 if none


RESTARTED_KINDS = frozenset({"agent-kill", "watch-kill"})
"""Faults of rolecall's own processes: resolved when their supervisor has restarted them, without an incident."""


class FaultSchedule:
    """WARMING -> (WAITING -> STRUCK)* -> DONE. `tick` returns the fault to inject now, if any."""

    def __init__(self, seed: int, faults: Sequence[str]) -> None:
        self._pending = list(scheduled_faults(seed, faults))
        self.stage = DemoStage.WARMING if self._pending else DemoStage.DONE
        self._strike_at = 0.0
        self._deadline = 0.0
        self._injected_before = 0
        self._kind = ""

    def tick(self, view: View) -> ScheduledFault | None:
        if self.stage is DemoStage.WARMING and view.whole and view.standbys_ready and view.step >= WARM_STEPS:
            self._arm(view.now)
        elif self.stage is DemoStage.WAITING and not view.whole:
            # Another fault occurred: restart the gap once the fleet is healthy.
            self._strike_at = view.now + self._pending[0].gap_seconds
        elif self.stage is DemoStage.WAITING and view.now >= self._strike_at:
            self.stage = DemoStage.STRUCK
            self._deadline = view.now + RECOVERY_DEADLINE_SECONDS
            self._injected_before = view.injected
            strike = self._pending.pop(0)
            self._kind = strike.kind
            return strike
        elif self.stage is DemoStage.STRUCK:
            over_at = view.restarted_at if self._kind in RESTARTED_KINDS else view.incident_closed_at
            is_over = view.injected > self._injected_before and not view.injecting
            resolved = is_over and view.whole and over_at > view.injected_at
            if (resolved or view.now > self._deadline) and self._pending:
                self._arm(view.now)
            elif resolved or view.now > self._deadline:
                self.stage = DemoStage.DONE
        return None

    def _arm(self, now: float) -> None:
        self.stage = DemoStage.WAITING
        self._strike_at = now + self._pending[0].gap_seconds
