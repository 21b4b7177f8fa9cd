"""The schedule of faults: every cell (kind of fault, role) in a random order that depends on the seed alone."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.recovery.chaos.lines import Line

ROLES = ("trainer", "rollout", "reward", "controller", "standby")
NUM_FAULTS = 1000
SPARE_NODES = 2
"""Nodes without a replica: so many may be lost in one run."""
TRIES_MAX = 2
"""A fault that could not be injected is tried once more, in a later piece."""
STANDBY_WAITS = "a standby waits: it does no unit of work in which this could happen"
NO_CHECKPOINT = "the controller has no checkpoint at which a fault in the process could begin"
NO_UNITS = "the controller's work is not counted in units, so that no slowness of it is defined"
NO_NUMBERS = "the controller computes no numbers of the training"
DELAY_IS_OF_ENGINES = "the delay is one of engine steps; duty and quota slow this role"
HEAD = "its node is the first one: the loss of Ray's head there ends the run (docs/architecture.md)"
NOT_OF_A_ROLE = "not of one role: counted once, under the controller"
GIVES_NO_WEIGHTS = "it gives no weights to others"
SHARED_NETWORK = (
    "the nodes of the bundled cluster share one network, so that none can be cut off; measured between network "
    "namespaces instead (tests/rl_runtime/cluster/test_partition.py, tests/detector/live/test_partition.py)"
)
SHARED_CLOCK = (
    "the nodes share the host's clock, and a jump of it would hit processes outside of the run; detection is tested on "
    "scenarios instead (tests/watch/test_clock_set.py)"
)
SAME_NODE = "counted under the controller, whose node it shares at the start"
MATRIX: Mapping[str, Mapping[str, str]] = {
    "kill": {role: f"{role}-kill:kill" for role in ROLES},
    "stop": {role: f"{role}-hang:stop" for role in ROLES},
    **{
        name: {
            **{role: f"{role}-hang:{how}" for role in ("trainer", "rollout", "reward")},
            "controller": NO_CHECKPOINT,
            "standby": STANDBY_WAITS,
        }
        for name, how in (("GIL held", "gil"), ("lock never released", "lock"), ("read that never returns", "read"))
    },
    **{
        f"slow by {how}": {
            **{role: f"{role}-slow:{how}" for role in ("trainer", "rollout", "reward")},
            "controller": NO_UNITS,
            "standby": STANDBY_WAITS,
        }
        for how in ("duty", "quota")
    },
    "slow by delay": {
        "trainer": DELAY_IS_OF_ENGINES,
        "rollout": "rollout-slow:delay",
        "reward": DELAY_IS_OF_ENGINES,
        "controller": NO_UNITS,
        "standby": STANDBY_WAITS,
    },
    "NaN": {
        "trainer": "trainer-nan:nan",
        "rollout": "rollout-nan:nan",
        "reward": "reward-nan:nans",
        "controller": NO_NUMBERS,
        "standby": STANDBY_WAITS,
    },
    "wrong weights or numbers": {
        "trainer": "trainer-wrong:scale",
        "rollout": "rollout-wrong:skew",
        "reward": "reward-wrong:skew",
        "controller": NO_NUMBERS,
        "standby": STANDBY_WAITS,
    },
    "killed while it gives weights": {
        "trainer": "holder-kill:kill",
        "rollout": "relay-kill:kill",
        **dict.fromkeys(ROLES[2:], GIVES_NO_WEIGHTS),
    },
    "corrupted transfer": {
        "trainer": "holder-corrupt:flip",
        "rollout": "relay-corrupt:flip",
        **dict.fromkeys(ROLES[2:], GIVES_NO_WEIGHTS),
    },
    "node lost": {
        **{role: "node-kill:kill" for role in ("trainer", "rollout", "standby")},
        **dict.fromkeys(("reward", "controller"), HEAD),
    },
    "agent dead": {
        **{role: "agent-kill:kill" for role in ("trainer", "rollout", "controller", "standby")},
        "reward": SAME_NODE,
    },
    **{
        name: {**dict.fromkeys(ROLES, NOT_OF_A_ROLE), "controller": fault}
        for name, fault in (
            ("watch dead", "watch-kill:kill"),
            ("journal down", "journal-down:locked"),
            ("disk full", "disk-full:fill"),
        )
    },
    "partition": dict.fromkeys(ROLES, SHARED_NETWORK),
    "clock jump": dict.fromkeys(ROLES, SHARED_CLOCK),
}
"""Kind of fault -> role -> the injector's `kind:how`, or why there is none. Controller dead: kill of the controller."""
CLASSES: Mapping[str, frozenset[str]] = {
    "kill": frozenset({"crash"}),
    "hang": frozenset({"hang"}),
    "slow": frozenset({"slow"}),
    # An engine whose log-probabilities are no numbers is contained: its work ends.
    "nan": frozenset({"silent_corruption", "crash"}),
    "wrong": frozenset({"silent_corruption", "wrong_weights"}),
    "corrupt": frozenset({"silent_corruption", "wrong_weights", "network"}),
    # The controller ends at the first write that fails.
    "down": frozenset({"crash", "resource_exhausted"}),
    "full": frozenset({"crash", "resource_exhausted"}),
}
"""Fault classes that are right, by the last word of the injector's kind; a lost node's is `node_lost`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    number: int
    name: str  # row of MATRIX
    role: str
    kind: str
    how: str
    seed: int

    @property
    def last_word(self) -> str:
        return self.kind.rpartition("-")[2]

    @property
    def classes(self) -> frozenset[str]:
        return frozenset({"node_lost"}) if self.kind == "node-kill" else CLASSES[self.last_word]

    @property
    def of_helper(self) -> str:
        """`agent` or `watch`: its restart is recorded, and is no incident."""
        helper = self.kind.partition("-")[0]
        return helper if helper in ("agent", "watch") else ""


def is_reason(cell: str) -> bool:
    return " " in cell


def cells() -> list[tuple[str, str, str, str]]:
    """(row, role, kind, how) of every fault that can be injected."""
    return [
        (name, role, *cell.split(":"))  # type: ignore[misc]
        for name, row in MATRIX.items()
        for role, cell in row.items()
        if not is_reason(cell)
    ]


def not_there() -> Iterator[tuple[str, list[str], str]]:
    """(row, roles, reason) of the cells without a fault."""
    for name, row in MATRIX.items():
        by_reason: dict[str, list[str]] = defaultdict(list)
        for role, cell in row.items():
            if is_reason(cell):
                by_reason[cell].append(role)
        for reason, roles in by_reason.items():
            yield name, roles, reason


def schedule(seed: int, count: int = NUM_FAULTS) -> list[Fault]:
    """All cells in random order, then again, until there are `count` faults; the same for the same seed."""
    rng, found = random.Random(f"chaos-{seed}"), list[Fault]()
    while len(found) < count:
        turn = cells()
        rng.shuffle(turn)
        for name, role, kind, how in turn:
            fault = Fault(number=len(found), name=name, role=role, kind=kind, how=how, seed=rng.randrange(2**31))
            found.append(fault)
    return found[:count]


def counted(lines: Iterable[Line]) -> dict[tuple[int, int], Line]:
    """(seed, number) -> the line that counts: the first injection, or else the last refusal."""
    found: dict[tuple[int, int], Line] = {}
    for line in lines:
        if line["line"] == "fault":
            key = line["seed"], line["number"]
            if key not in found or not found[key]["injected"]:
                found[key] = line
    return found


def piece(seed: int, lines: Sequence[Line], size: int, first: int = 0) -> list[Fault]:
    """The next faults of the schedule from `first` on; no more lost nodes among them than there are spare ones."""
    done = {number for (of_seed, number), line in counted(lines).items() if of_seed == seed and line["injected"]}
    tries: dict[int, int] = defaultdict(int)
    for line in lines:
        if line["line"] == "fault" and line["seed"] == seed:
            tries[line["number"]] += 1
    found, lost = list[Fault](), 0
    for fault in schedule(seed)[first:]:
        if fault.number in done or tries[fault.number] >= TRIES_MAX:
            continue
        lost += fault.kind == "node-kill"
        if len(found) == size or lost > SPARE_NODES:
            break
        found.append(fault)
    return found
