"""What the controller knows of one rollout's engine, what every engine should hold, and who judges its proof."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from rolecall.core.membership import Actual
from rolecall.rl_runtime.controller.open_group import EngineKey
from rolecall.rl_runtime.protocol.clients import RolloutPort
from rolecall.rl_runtime.protocol.messages import Holder, Manifest, WeightProof


class AdmissionDecision(Protocol):
    """Whether a proof is enough, and why. Raises nothing."""

    @property
    def admitted(self) -> bool: ...
    @property
    def because(self) -> str: ...
    @property
    def part(self) -> str: ...
    @property
    def tensor(self) -> str: ...


class WeightVerifier(Protocol):
    """Judges an engine's proof (invariant Proof before service, docs/invariants.md): `proof.WeightVerifier`."""

    def judge(
        self, manifest: Manifest, proof: WeightProof, *, incarnation: int | None = None, epoch: int | None = None
    ) -> AdmissionDecision: ...


@dataclass(frozen=True, slots=True)
class DesiredWeights:
    """What every engine should hold."""

    manifest: Manifest
    holders: tuple[Holder, ...]


@dataclass(eq=False, slots=True)
class EngineState:
    """One incarnation of a rollout replica."""

    port: RolloutPort
    record: Actual
    holder: Holder
    version: int = -1  # newest policy version that it has proven
    proven: str = ""  # digest of that version's manifest
    serving: bool = False
    behind_since: float | None = None  # seconds of the loop's clock; None: it has proven what it should hold
    silent: bool = False
    draining: bool = False
    holds_unknown: bool = False  # it was greeted with requests of the controller before, and nobody asked yet which
    failures: int = 0
    tokens_seen: int = 0  # its own counter of tokens made, just after the last pull
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def key(self) -> EngineKey:
        return self.port.replica, self.port.incarnation
