"""Which replica lends its node to a trainer that must leave its own, and when a lender runs again. Pure.

A trainer that must leave its node takes the process of a trainer standby, else a free node. Without either, a rollout,
or a standby for rollouts, ends and lends its node until one is free again: without the trainer every step takes longer,
and without one of several rollouts some of the tokens come later (RobustRL, arXiv 2512.22492, section 5). A lender

    - serves, and no open incident concerns it (a standby: is ready)
    - is alone on its node, which has a GPU for each rank of a trainer, and memory for it
    - leaves at least `recovery.rollouts_min` serving rollouts

Of several, the one whose end costs least: a standby, which has no work; then the rollout with the fewest tokens of
unfinished requests, because another engine computes them again as a prefix; then the one with the fewest requests.
Loads that are not known count as the largest.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rolecall.core.diagnosis import PlanTarget, ReplicaLoad
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.membership import HYBRID_ROLES, STANDBY_ROLE, ReplicaState, is_standby
from rolecall.core.text import counted
from rolecall.recovery.fleet_view import FleetView, ReplicaView

BORROWER = "trainer"
LENDERS = ("rollout", STANDBY_ROLE)
OTHERS_NAMED_MAX = 8
"""Candidates that a reason lists; a fleet may have hundreds."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """Lenders, in the order of the replicas that need a node; none of them if there are not enough."""

    lenders: tuple[PlanTarget, ...]
    because: str


def choose_lenders(
    fleet: FleetView,
    loads: Mapping[str, ReplicaLoad],
    number: int,
    *,
    rollouts_min: int,
    avoid: Collection[str] = (),
    busy: Collection[str] = (),
) -> Loan:
    """`avoid`: nodes on which nothing may be placed. `busy`: replicas that open incidents concern."""
    serving = [
        r
        for r in fleet.of_role("rollout")
        if r.living and r.state is ReplicaState.SERVING and r.node not in avoid and r.replica not in busy
    ]
    refused: dict[str, str] = {}
    fit: list[ReplicaView] = []
    for view in (r for role in LENDERS for r in fleet.of_role(role) if not r.lent):
        why_not = _why_not(view, fleet, loads.get(view.replica, ReplicaLoad()), avoid, busy)
        if why_not:
            refused[view.replica] = why_not
        else:
            fit.append(view)
    fit.sort(key=lambda r: _cost(r, loads.get(r.replica)))
    spared = max(0, len(serving) - rollouts_min)
    chosen = [r for r in fit if is_standby(r.replica)]
    chosen = [*chosen, *[r for r in fit if not is_standby(r.replica)][:spared]][:number]
    if len(chosen) < number:
        bound = f"{counted(len(serving), 'rollout')} serving, {rollouts_min} must remain (recovery.rollouts_min)"
        reasons = [f"{name} {why}" for name, why in refused.items()]
        return Loan(lenders=(), because="; ".join([bound, *_few(reasons)]))
    texts = [_text(r, loads.get(r.replica, ReplicaLoad()), fleet) for r in chosen]
    others = [f"{r.replica}: {_held(loads.get(r.replica))}" for r in fit if r not in chosen]
    if others:
        texts.append(f"more would be lost with {', '.join(_few(others))}")
    texts += [f"{name} {why}" for name, why in list(refused.items())[:OTHERS_NAMED_MAX]]
    left = len(serving) - sum(not is_standby(r.replica) for r in chosen)
    texts.append(f"{counted(left, 'rollout')} of {len(serving)} go on, at least {rollouts_min} must")
    lenders = tuple(PlanTarget(replica=r.replica, incarnation=r.incarnation, node=r.node) for r in chosen)
    return Loan(lenders=lenders, because="; ".join(texts))


def _why_not(
    view: ReplicaView, fleet: FleetView, load: ReplicaLoad, avoid: Collection[str], busy: Collection[str]
) -> str:
    """Why a replica cannot lend its node; empty if it can."""
    if view.replica in busy:
        return "is part of an open incident"
    if not view.living or (view.state is not ReplicaState.SERVING and not is_standby(view.replica)):
        return f"is {view.state or 'not started'}"
    if view.node in avoid:
        return f"runs on {view.node}, on which nothing may be placed"
    others = [str(r.replica) for r in fleet.on(view.node) if r.replica != view.replica]
    if others:
        return f"shares {view.node} with {', '.join(others)}"
    places = fleet.places
    if not places.has_gpus(view.node, BORROWER):
        there, needed = places.gpus.get(view.node, 0), places.gpus_needed(BORROWER)
        return f"has {counted(there, 'GPU')} on {view.node}, and a trainer needs {needed}"
    needed_bytes = _needed_bytes(fleet)
    if needed_bytes is None or load.available_bytes is None:
        return ""
    if needed_bytes > load.available_bytes + load.rss_bytes:
        return f"would leave {_memory(load)} on {view.node}, and a trainer needs {needed_bytes / GIB:.1f} GiB"
    return ""


def _needed_bytes(fleet: FleetView) -> int | None:
    """Host memory of what comes to the node: a trainer, or a whole hybrid. None: unknown."""
    places = fleet.places
    roles = HYBRID_ROLES if places.num_hybrids else (BORROWER,)
    known = [places.memory_bytes[r] for r in roles if r in places.memory_bytes]
    return sum(known) if known else None


def _cost(view: ReplicaView, load: ReplicaLoad | None) -> tuple[bool, float, float, str]:
    held = load or ReplicaLoad()
    tokens, requests = (math.inf if n is None else float(n) for n in (held.tokens, held.requests))
    return (not is_standby(view.replica), tokens, requests, view.replica)


def _text(view: ReplicaView, load: ReplicaLoad, fleet: FleetView) -> str:
    """`rollout/2#1 lends node-5: it holds 3 requests with 41 tokens`, and what fits."""
    what = "it has no work" if is_standby(view.replica) else f"it holds {_held(load)}"
    parts = [f"{view.replica}#{view.incarnation} lends {view.node}: {what}"]
    places = fleet.places
    if places.gpus:
        there = counted(places.gpus.get(view.node, 0), "GPU")
        parts.append(f"{places.gpus_needed(BORROWER)} of its {there} are needed")
    if (needed_bytes := _needed_bytes(fleet)) is not None and load.available_bytes is not None:
        parts.append(f"a trainer needs {needed_bytes / GIB:.1f} GiB, and {_memory(load)} will be free")
    return ", ".join(parts)


def _held(load: ReplicaLoad | None) -> str:
    if load is None or load.requests is None:
        return "an unknown number of requests"
    tokens = "" if load.tokens is None else f" with {counted(load.tokens, 'token')}"
    return f"{counted(load.requests, 'unfinished request')}{tokens}"


def _memory(load: ReplicaLoad) -> str:
    return f"{(load.available_bytes or 0) / GIB:.1f} + {load.rss_bytes / GIB:.1f} GiB"


def _few(texts: Sequence[str]) -> list[str]:
    left = len(texts) - OTHERS_NAMED_MAX
    return [*texts[:OTHERS_NAMED_MAX], *([f"{left} more"] if left > 0 else [])]


def remaining(fleet: FleetView, lenders: Iterable[PlanTarget]) -> int:
    """Rollouts that serve when these have ended."""
    ended = {t.replica for t in lenders}
    return sum(
        r.living and r.state is ReplicaState.SERVING and r.replica not in ended for r in fleet.of_role("rollout")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comeback:
    """A replica that had lent its node is to run again."""

    replica: ReplicaId
    incarnation: int
    node: NodeId
    because: str


def comebacks(fleet: FleetView, avoid: Collection[str] = ()) -> list[Comeback]:
    """One for each lender for which a node is free: rollouts before standbys."""
    found: list[Comeback] = []
    for view in sorted((r for r in fleet.replicas if r.lent), key=lambda r: (is_standby(r.replica), r.replica)):
        taken = {c.node for c in found}
        node = next((n for n in fleet.free_nodes(view.role, avoid) if n not in taken), None)
        if node is not None:
            because = f"{node} is free: {view.replica}, which had lent its node, runs again"
            number = view.desired_incarnation + 1
            found.append(Comeback(replica=view.replica, incarnation=number, node=node, because=because))
    return found
