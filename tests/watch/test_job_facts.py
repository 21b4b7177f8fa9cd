"""Facts of a job for `rolecall doctor --job`: from agents that answer, refuse, or do not, and from dry runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.cli.main import main
from rolecall.core.config.watched import parse_watched
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import (
    NO_PAGE,
    UNCOUNTED,
    AgentEvent,
    AgentEventKind,
    ProcessSample,
    SampleBatch,
)
from rolecall.recovery.actuators.targets.choice import target_of
from rolecall.watch.capabilities import JobFacts
from rolecall.watch.job_facts import NoAnswer, assemble, node_state, read_job, replacements
from tests.agent.processes import NODE, AgentProcess, Child
from tests.support import eventually

WALL = 1_800_000_000.0


def process(node: str, pid: int) -> ProcessId:
    return ProcessId(node=NodeId(node), pid=pid, start_ticks=9)


def sample(node: str, pid: int, replica: str = "trainer/0", *, rank: int = 0, alive: bool = True) -> ProcessSample:
    return ProcessSample(
        process=process(node, pid),
        role=replica.partition("/")[0],
        replica=replica,
        rank=rank,
        incarnation=UNCOUNTED,
        at=10.0,
        wall_at=WALL,
        alive=alive,
        page_ok=False,
        phase=NO_PAGE,
    )


def batch(node: str, *samples: ProcessSample) -> SampleBatch:
    return SampleBatch(
        node=NodeId(node), agent_pid=7, cursor=1, lost=0, at=10.0, wall_at=WALL, processes=samples, hosts=()
    )


def registered(
    node: str, pid: int, seq: int, replica: str = "trainer/0", at: float = WALL, **detail: str
) -> AgentEvent:
    return AgentEvent(
        seq=seq,
        kind=AgentEventKind.REGISTERED,
        node=NodeId(node),
        at=1.0,
        wall_at=at,
        process=process(node, pid),
        role=replica.partition("/")[0],
        replica=replica,
        detail=detail,
    )


def test_only_living_ranks_of_the_job_are_its_ranks() -> None:
    batches = [
        [batch("a", sample("a", 1), sample("a", 2, rank=1), sample("a", 3, "rollout/0"), sample("a", 4, rank=3))]
    ]
    dead = [batch("a", sample("a", 1, alive=False))]
    events = [
        registered("a", 1, 1, job="4711"),
        registered("a", 2, 2, job="4711", rendezvous="h:1"),
        registered("a", 3, 3, "rollout/0", job="4712"),
    ]
    facts = assemble([*batches, dead], events, "4711", WALL)
    assert [(r.replica, r.rank, r.job) for r in facts.ranks] == [("trainer/0", 1, "4711")]
    assert facts.other_jobs == ("4712",) and facts.unknown_job == 1
    assert [r.rank for r in assemble(batches, events, "h:1", WALL).ranks] == [1]
    assert len(assemble(batches, events, "all", WALL).ranks) == 4


def test_a_rank_that_registers_itself_is_no_longer_found_by_a_rule() -> None:
    events = [
        registered("a", 1, 1, at=WALL - 9, found_by="torchrun", launcher_pid="5", job="h:1", pod_uid="u"),
        registered("a", 1, 2, at=WALL - 5, launcher="torchrun", rendezvous="h:1", job="djob", source="hooks"),
    ]
    (rank,) = assemble([[batch("a", sample("a", 1))]], events, "djob", WALL).ranks
    assert (rank.found_by, rank.launcher, rank.source, rank.pod_uid) == ("", "torchrun", "hooks", "u")
    assert (rank.job, rank.rendezvous, rank.registered_at) == ("djob", "h:1", WALL - 9)


def test_ranks_of_two_nodes_with_one_name_are_named_as_a_watch_names_them() -> None:
    batches = [[batch("a", sample("a", 1))], [batch("b", sample("b", 1))]]
    names = [r.replica for r in assemble(batches, [], "all", WALL).ranks]
    assert len(set(names)) == 2 and "trainer/0" in names


# --- dry runs ---------------------------------------------------------------------------------------------------------


def _facts() -> JobFacts:
    batches = [[batch("a", sample("a", 1, "rollout/0"), sample("a", 2, "rollout/1"), sample("a", 3))]]
    return assemble(batches, [], "all", WALL)


def _dry_runs(**actuator: Any) -> dict[str, Any]:
    watched = parse_watched({"roles": ["rollout"], "actuator": actuator})
    assert watched.actuator is not None
    return dict(replacements(_facts().ranks, watched.roles, target_of(watched.actuator)))


def test_the_actuator_tells_its_calls_for_the_roles_of_the_watch_file() -> None:
    found = _dry_runs(kind="command", replace=["/no/such/program", "{replica}", "{pid}"])
    assert {name: it.calls for name, it in found.items()} == {
        "rollout/0": ("/no/such/program rollout/0 1",),
        "rollout/1": ("/no/such/program rollout/1 2",),
    }
    assert not any(it.refused or it.also or it.beyond for it in found.values())


def test_what_would_end_beyond_the_roles_is_told() -> None:
    found = _dry_runs(kind="command", replace=["x"], also_ends="node")["rollout/0"]
    assert (found.also, found.beyond) == (("rollout/1", "trainer/0"), ("trainer/0",))


def test_a_refusal_is_told_with_its_reason() -> None:
    found = _dry_runs(kind="slurm")
    assert "not started by srun" in found["rollout/0"].refused and not found["rollout/0"].calls


# --- agents -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    it = AgentProcess(tmp_path / "node")
    yield it
    it.close()


@pytest.fixture
def child(agent: AgentProcess) -> Iterator[Child]:
    it = Child(agent.node_dir)
    it.start("trainer/0", incarnation=0)
    it.do("reporter.set_step(7)", "reporter.enter_phase('step')", "reporter.progress()")
    eventually(lambda: (agent.newest("trainer/0") or {}).get("step") == 7, "its step is sampled")
    yield it
    it.close()


def doctor(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = main(["doctor", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_rank_is_asked_for_at_its_agent(
    agent: AgentProcess, child: Child, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "watch.yaml").write_text("roles: [trainer]\nactuator: {kind: processes}\n")
    agents = f"http://{agent.netloc},gone=http://127.0.0.1:1"
    code, said = doctor("--job", "all", "--agents", agents, "--config", str(tmp_path / "watch.yaml"), capsys=capsys)
    (rank,) = said["ranks"]
    assert code == 1, "an agent does not answer"
    assert (rank["node"], rank["pid"], rank["step"], rank["found_by"]) == (NODE, child.pid, 7, "reporter")
    assert {n["node"]: bool(n["unreachable"]) for n in said["nodes"]} == {NODE: False, "gone": True}
    found = {(c["about"], c["name"]): c for c in rank["capabilities"]}
    assert found["seen", "steps"]["can"] == "yes" and "the job's own calls" in found["seen", "steps"]["because"]
    assert found["named", "hang in a step"]["can"] == "yes"
    assert "token is not given" in found["seen", "stacks"]["because"]
    assert found["replaced", "replica"]["because"] == "by 1 call of actuator processes; mode observe calls nothing"


def test_a_job_without_ranks_is_not_well(agent: AgentProcess, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = doctor("--job", "4711", "--agents", f"http://{agent.netloc}", capsys=capsys)
    assert (code, said["ranks"]) == (1, [])


def test_stacks_are_asked_for_with_the_token_only(agent: AgentProcess, child: Child) -> None:
    asked: list[str] = []

    def get(url: str, path: str, seconds: float) -> bytes:
        asked.append(path)
        if "evidence" in path:
            raise NoAnswer("py-spy is not installed")
        status, body = agent.get(path)
        assert status == 200
        return (body if isinstance(body, str) else json.dumps(body)).encode()

    def look(known: bool) -> str | None:
        facts = read_job(
            [f"http://{agent.netloc}"],
            "all",
            None,
            wall_at=WALL,
            ask_node=lambda url: NODE,
            get=get,
            may_read_stacks=lambda url: known,
        )
        return facts.nodes[0].stacks

    assert look(False) is None and not any("evidence" in path for path in asked)
    assert look(True) == "py-spy is not installed"
    assert f"/v1/evidence/stacks?pid={child.pid}" in asked


def test_the_kind_of_server_is_known_of_each_engine_that_is_read() -> None:
    page = """rolecall_engine_up{node="node-1",rank="0",replica="rollout/0",role="rollout"} 0.0
rolecall_engine_up{node="node-1",rank="0",replica="rollout/1",role="rollout"} 1.0
rolecall_engine_info{node="node-1",rank="0",replica="rollout/1",role="rollout",server="sglang"} 1.0
"""
    assert node_state(NODE, "", page).engines == {("rollout/1", 0): "sglang"}


@pytest.mark.parametrize(
    "body", [b"no JSON", b"[]", b'{"version": 99}'], ids=["no JSON", "not an object", "another version"]
)
def test_an_agent_that_answers_nonsense_is_told(body: bytes) -> None:
    facts = read_job(
        ["node-1=http://127.0.0.1:1"],
        "all",
        None,
        wall_at=WALL,
        ask_node=lambda url: NODE,
        get=lambda url, path, seconds: body,
        may_read_stacks=lambda url: False,
    )
    assert facts.nodes[0].unreachable and not facts.ranks


def test_a_job_whose_name_is_an_unset_variable_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--job", ""]) == 2
    assert capsys.readouterr() == ("", "rolecall: --job: name a job, or all\n")


@pytest.mark.parametrize("wrong", [("job.yaml",), ("--pid", "1"), ("--plan",), ("--nhc",)])
def test_options_of_the_other_checks_are_refused(wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--job", "all", *wrong]) == 2
    assert "--job: not with JOB, --pid, --plan or --nhc" in capsys.readouterr().err
