"""An agent's own events, read afterwards: exits, exceptions and the node's word, as the live detectors tell them."""

import json
from pathlib import Path

import pytest

from rolecall.agent.events import EventLog
from rolecall.core.clock import FakeClock
from rolecall.core.errors import UnreadableInput
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import UNCOUNTED, AgentEventKind
from rolecall.detector.base.read_budget import Budget, ReadLimits
from rolecall.detector.panels.registry import detector
from rolecall.detector.sources import agent_event_files as agent_events
from rolecall.diagnose.diagnose import diagnose

NODE = NodeId("node-1")


class Agent:
    """The real event log of a node, on a clock of the test's."""

    def __init__(self, path: Path, node: str = "node-1") -> None:
        path.parent.mkdir(exist_ok=True)
        self.clock = FakeClock()
        self.node, self.incarnation = NodeId(node), 1
        self.log = EventLog(path, self.node, self.clock)

    def says(self, kind: AgentEventKind, rank: int | None = None, after: float = 1.0, **detail: str) -> None:
        self.clock.advance(after)
        if rank is None:
            self.log.append(kind, detail=detail)
            return
        process = ProcessId(node=self.node, pid=100 + rank, start_ticks=7)
        replica = f"trainer/{rank}"
        self.log.append(
            kind, process=process, role="trainer", replica=replica, incarnation=self.incarnation, detail=detail
        )


def test_an_xid_and_the_crash_after_it_are_one_diagnosis(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "events.jsonl")
    for rank in range(4):
        agent.says(AgentEventKind.REGISTERED, rank)
    agent.says(AgentEventKind.XID, after=60.0, xid="79", gpu="2", line="NVRM: Xid (PCI:0000:3b:00): 79")
    agent.says(AgentEventKind.EXITED, 2, signal="6", last_phase="compute")
    agent.log.close()
    answer = diagnose([tmp_path / "events.jsonl"], [detector("sequential")])
    (d,) = answer.diagnoses
    assert d.fault_class == "gpu" and [s.replica for s in d.suspects] == ["trainer/2"]
    assert "XID 79 on GPU 2" in d.because and "reboot" in d.advice
    (looked,) = answer.inputs
    assert looked.kind == "agent events" and "6 events of 1 node" in looked.content


def test_a_process_that_events_do_not_mention_for_a_while_has_not_vanished(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "events.jsonl")
    agent.incarnation = UNCOUNTED
    for rank in range(4):
        agent.says(AgentEventKind.REGISTERED, rank)
    agent.says(AgentEventKind.AGENT_STARTED, after=60.0)
    for _ in range(8):
        agent.says(AgentEventKind.OTHER, after=10.0)
    agent.says(AgentEventKind.EXITED, 2, signal="11")
    agent.log.close()
    (d,) = diagnose([tmp_path / "events.jsonl"], [detector("sequential")]).diagnoses
    assert d.fault_class == "crash" and [s.replica for s in d.suspects] == ["trainer/2"]


def test_advice_is_stated_once(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "events.jsonl")
    for rank in range(4):
        agent.says(AgentEventKind.REGISTERED, rank)
    agent.says(AgentEventKind.EXITED, 2, signal="9", last_phase="compute")
    agent.log.close()
    (d,) = diagnose([tmp_path / "events.jsonl"], [detector("sequential")]).diagnoses
    assert d.advice == FaultClass.CRASH.spec.advice


def test_events_of_several_nodes_are_one_story(tmp_path: Path) -> None:
    """The same exception on all ranks is the job's code, whichever node each ran on."""
    for n, folder in enumerate(("a", "b")):
        agent = Agent(tmp_path / folder / "events.jsonl", f"node-{n}")
        for rank in (2 * n, 2 * n + 1):
            agent.says(AgentEventKind.REGISTERED, rank, after=0.1)
        for rank in (2 * n, 2 * n + 1):
            detail = {"type": "KeyError", "message": "x", "where": "train.py:3 step", "fingerprint": "f", "step": "3"}
            agent.says(AgentEventKind.EXCEPTION, rank, after=0.2, **detail)
            agent.says(AgentEventKind.EXITED, rank, after=0.1, code="1")
        agent.log.close()
    (d,) = diagnose([tmp_path], [detector("sequential")]).diagnoses
    assert d.fault_class == "user_code" and "KeyError" in d.because


def test_a_replica_that_lost_ranks_on_two_nodes_is_one_diagnosis_that_names_both(tmp_path: Path) -> None:
    for n, (name, how) in enumerate((("a", {"signal": "9"}), ("b", {"signal": "11"}))):
        agent = Agent(tmp_path / name / "events.jsonl", f"node-{n}")
        process = ProcessId(node=agent.node, pid=100, start_ticks=7)
        for kind, after, detail in (
            (AgentEventKind.REGISTERED, 1.0, {}),
            (AgentEventKind.EXITED, 60.0 + 30.0 * n, how),
        ):
            agent.clock.advance(after)
            agent.log.append(
                kind, process=process, role="trainer", replica="trainer/0", rank=n, incarnation=1, detail=detail
            )
        agent.log.close()
    (d,) = diagnose([tmp_path], [detector("sequential")]).diagnoses
    assert [(s.node, s.rank) for s in d.suspects] == [("node-0", 0), ("node-1", 1)]
    assert "independent second fault: trainer/0 rank 1 (node-1" in d.because


def test_a_quiet_node_is_healthy_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    agent = Agent(path)
    agent.says(AgentEventKind.AGENT_STARTED, pid="1")
    agent.says(AgentEventKind.REGISTERED, 0)
    agent.says(AgentEventKind.FINISHED, 0, reason="done")
    agent.says(AgentEventKind.EXITED, 0, code="0")
    agent.log.close()
    with path.open("a") as f:
        f.write('[]\n{"seq": "x"}\n{"seq": 9, "kind": "exi')
    answer = diagnose([path], [detector("sequential")])
    assert answer.diagnoses == []
    assert "3 damaged lines" in answer.inputs[0].remarks[0]


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", '{"seq": 1, "kind": "exited"}\n', "{" * 100_000, "NVRM: Xid"])
def test_other_files_are_not_event_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    assert not agent_events.is_events(path)


def test_a_file_without_one_good_event_is_refused_and_one_too_large_is_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"seq": 1, "kind": "exited", "node": "No Node", "wall_at": 1.0, "at": 1.0}) + "\n")
    assert agent_events.is_events(path)
    with pytest.raises(UnreadableInput, match="none of its lines"):
        agent_events.read(path, Budget())
    good = {"seq": 1, "kind": "exited", "node": "node-1", "wall_at": 1.0, "at": 1.0}
    path.write_text((json.dumps(good) + "\n") * 2000)
    budget = Budget(ReadLimits(kept_bytes_max=1000))
    assert len(agent_events.read(path, budget).events) == agent_events.CHECK_LINES
    assert budget.stopped is not None and "memory" in budget.stopped.reason
