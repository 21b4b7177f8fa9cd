"""The same trouble, and people who talk all the time: they hold, lift, approve, reject, review, replace, quarantine,
drain and return at random moments, also between a watch's decision and its write. No word breaks an incident, what is
held or rejected does not begin, and nothing is placed on a quarantined node.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.core.errors import CommandRefused
from rolecall.core.journal.events import EventKind
from rolecall.core.nodes import quarantined_nodes
from rolecall.core.rundir import RunDir
from rolecall.recovery.incidents import Decision
from rolecall.recovery.operators import commands, queries
from rolecall.testing.recovery_world import FLEET
from tests.recovery.test_simulation import KEEPS_OUT, Simulation

K = EventKind
NUM_SEEDS = 4
TALK_SECONDS = 60.0
QUIET_SECONDS = 900.0
NODES = [f"node-{n}" for n, replica in enumerate(FLEET) if replica != KEEPS_OUT]
"""As `FakeRuntime` places them; that of the replica that nothing may happen to is left alone."""


class Talk(Simulation):
    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path, seed, mode=["act", "approve"][seed % 2], approval_timeout_seconds=15.0)
        self.run_dir = RunDir(path)
        self.said: Counter[str] = Counter()
        self.talking = True
        self.shut: frozenset[str] = frozenset()
        self.placed: dict[str, tuple[int, str]] = {}
        pass_on = self.world.switch.point

        def point(what: str) -> None:
            pass_on(what)
            if self.talking and what.startswith("before append action_started") and self.rng.random() < 0.5:
                self.talk()

        self.world.switch.point = point  # type: ignore[method-assign]

    def trouble(self) -> None:
        super().trouble()
        if self.rng.random() < 0.5:
            self.talk()

    def calm(self) -> None:
        super().calm()
        self.talking = False

    def talk(self) -> None:
        rng, run, clock = self.rng, self.run_dir, self.world.clock
        found = list(self.book.incidents.values())
        plans = [i.attempt.plan.digest for i in found if i.attempt and i.outcome is None] or ["none"]
        digest, node = rng.choice(plans), rng.choice(NODES)
        name = rng.choice([i.incident_id for i in found] or ["none"])
        replica = rng.choice([r for r in FLEET if r != KEEPS_OUT])
        words: dict[str, Callable[[], str]] = {
            "hold": lambda: commands.hold_plan(run, digest, "ann", "wait", rng.choice([2.0, 10.0, 40.0]), clock),
            "lift": lambda: commands.lift_hold(run, digest, "bob", "go", clock),
            "approve": lambda: commands.approve_plan(run, digest, "cat", clock),
            "reject": lambda: commands.reject_plan(run, digest, "dan", "no", clock),
            "review": lambda: commands.review_diagnosis(run, name, rng.random() < 0.5, "eve", "", clock),
            "replace": lambda: commands.replace(run, replica, "why not", "fay", clock),
            "quarantine": lambda: commands.quarantine(run, node, "gus", "a look", clock),
            "return": lambda: commands.return_node(run, node, "hal", "seen", clock),
            "drain": lambda: commands.drain(run, node, "ida", "a fan", clock),
        }
        word = rng.choices(list(words), weights=[6, 3, 6, 1, 2, 2, 1, 3, 1])[0]
        try:
            words[word]()
            self.said[word] += 1
        except CommandRefused:
            self.said[f"{word} refused"] += 1

    def validate(self) -> None:
        super().validate()
        for incident in self.book.incidents.values():
            for a in incident.attempts:
                if a.started_at is not None:
                    assert a.decision is not Decision.REJECTED
                    assert a.hold is None or not a.hold.active(a.started_at), f"held: {self.world.story()}"
        shut = frozenset(map(str, quarantined_nodes(self.world.journal)))
        placed = {str(r): (d.incarnation, str(d.node)) for r, d in self.world.journal.desired().items()}
        for replica, (incarnation, node) in placed.items():
            if self.placed.get(replica, (incarnation, ""))[0] != incarnation:
                # In quarantine since the last look, and still: an operator may speak right after the write.
                assert node not in self.shut & shut, f"{replica}#{incarnation} on {node}: {self.world.story()}"
        self.shut, self.placed = shut, placed


@pytest.mark.parametrize("number", range(NUM_SEEDS))
def test_talk(tmp_path: Path, seed: int, number: int) -> None:
    talk = Talk(tmp_path, seed * 1000 + number)
    talk.run(TALK_SECONDS, trouble=True)
    talk.calm()
    talk.run(QUIET_SECONDS, trouble=False)
    talk.all_cured_or_told()
    for incident in talk.book.incidents.values():
        if incident.attempts:
            assert queries.replay(talk.run_dir, incident.incident_id)["same"] is True


def test_the_talk_is_real(tmp_path: Path) -> None:
    """Over some seeds (always the same) every word was taken at least once, and refused where it can be."""
    said: Counter[str] = Counter()
    for number in (0, 1, 3, 5):
        (tmp_path / str(number)).mkdir()
        talk = Talk(tmp_path / str(number), number)
        talk.run(TALK_SECONDS, trouble=True)
        said += talk.said
    words = {"hold", "lift", "approve", "reject", "review", "replace", "quarantine", "return", "drain"}
    assert words <= said.keys(), said
    assert {"hold refused", "approve refused", "reject refused"} <= said.keys(), said
