"""What a watch can see, name, replace and end in a job, and why not: cases of samples, agents and watch files."""

from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.config.watched import parse_watched
from rolecall.core.diagnosis import ActionKind
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import NO_PAGE, UNCOUNTED, GpuSample, Phase, ProcessSample
from rolecall.terminal import doctor as rendering
from rolecall.terminal.console import as_text
from rolecall.watch.capabilities import (
    About,
    Can,
    Capability,
    JobFacts,
    NodeState,
    RankFacts,
    Replacement,
    capabilities,
)

NODE = NodeId("node-1")
Y, P, N, NONE = Can.YES, Can.PARTLY, Can.NO, Can.NONE


def sample(rank: int = 0, *, phase: str = NO_PAGE, replica: str = "trainer/0", **more: Any) -> ProcessSample:
    fields: dict[str, Any] = {
        "process": ProcessId(node=NODE, pid=40 + rank, start_ticks=9),
        "role": replica.partition("/")[0],
        "replica": replica,
        "rank": rank,
        "incarnation": UNCOUNTED,
        "at": 100.0,
        "wall_at": 1000.0,
        "alive": True,
        "page_ok": phase != NO_PAGE,
        "phase": phase,
    }
    return ProcessSample(**{**fields, **more})


def rank_of(*samples: ProcessSample, **more: Any) -> RankFacts:
    newest = samples[-1]
    fields: dict[str, Any] = {
        "process": newest.process,
        "role": newest.role,
        "replica": newest.replica,
        "rank": newest.rank,
        "samples": samples,
        "job": "4711",
    }
    return RankFacts(**{**fields, **more})


def found_by(rule: str, num_ranks: int = 4, **more: Any) -> tuple[RankFacts, ...]:
    return tuple(rank_of(sample(n), found_by=rule, **more) for n in range(num_ranks))


WORKS: dict[str, Any] = {"progress": 100, "step": 100, "phase_entries": 200, "work_units": 100}


def reporting(num_ranks: int = 4, *, source: str = "", **page: Any) -> tuple[RankFacts, ...]:
    """Ranks that report `step` and `wait`."""
    values = {**WORKS, **page}
    return tuple(
        rank_of(sample(n, phase=Phase.WAIT, **values), sample(n, phase=Phase.STEP, **values), source=source)
        for n in range(num_ranks)
    )


AGENT = NodeState(node=NODE, probes={"gpu": False, "kernel_log": True}, stacks="")


def of_first(ranks: tuple[RankFacts, ...], node: NodeState = AGENT, **more: Any) -> dict[tuple[About, str], Capability]:
    """The capabilities of the first rank, by name."""
    first = capabilities(JobFacts(ranks=ranks, nodes=(node,), **more))[0]
    return {(c.about, c.name): c for c in first.capabilities}


SEEN, NAMED, REPLACED = About.SEEN, About.NAMED, About.REPLACED
HOOKED = reporting(source="hooks", busy_seconds=9.0, exchanges=90)
COUNTED = reporting(source="hooks", busy_seconds=9.0, collectives_issued=300)
SHORT_STEPS = tuple(replace(r, samples=r.samples[:1]) for r in HOOKED)
COMPILED = tuple(
    rank_of(sample(n, phase=Phase.WAIT, progress=100, step=100, phase_entries=101), source="hooks") for n in range(2)
)
ALONE = (rank_of(sample(phase=Phase.WAIT, **WORKS), sample(phase=Phase.STEP, **WORKS), source="hooks"),)
TWO_LINES = tuple(replace(r, samples=r.samples[1:]) for r in reporting())
STARTED = (rank_of(sample(phase=Phase.START), source="integration"),)
VALUES = reporting(loss=0.5)
IN_STEPS = reporting(busy_seconds=9.0)
IN_COLLECTIVES = reporting(busy_seconds=9.0, collectives_entered=100)
NO_STACKS = replace(AGENT, stacks="py-spy is not installed")
NO_TOKEN = replace(AGENT, stacks=None)
GPUS = replace(
    AGENT,
    probes={"gpu": True, "gpu_events": True, "kernel_log": False},
    reasons={"kernel_log": "no permission"},
    gpus=(GpuSample(node=NODE, gpu=0, at=0.0, wall_at=0.0, pids=(40,)),),
)
ENGINE = (rank_of(sample(replica="rollout/0"), found_by="openrlhf-rollout"),)
SGLANG_ENGINE = (rank_of(sample(replica="rollout/0"), found_by="slime-rollout"),)
SCRAPED = replace(AGENT, engines={("rollout/0", 0): "vllm"})
SCRAPED_SGLANG = replace(AGENT, engines={("rollout/0", 0): "sglang"})
UNREAD = (rank_of(sample(), registered_at=990.0, source="hooks"),)
BUNDLED = (rank_of(replace(sample(phase=Phase.COMPUTE, **WORKS), incarnation=3)),)

CASES: dict[str, tuple[tuple[RankFacts, ...], NodeState, About, str, Can, str, str]] = {
    # a job that reports nothing
    "steps of torchrun": (found_by("torchrun"), AGENT, SEEN, "steps", N, "rule torchrun", "rolecall exec -- COMMAND"),
    "steps of srun": (found_by("slurm"), AGENT, SEEN, "steps", N, "rule slurm", "srun rolecall exec"),
    "steps of verl": (found_by("verl-trainer"), AGENT, SEEN, "steps", N, "verl", "rolecall env"),
    "steps of slime": (found_by("slime-trainer"), AGENT, SEEN, "steps", N, "slime", "rolecall env"),
    "steps of Ray Train": (found_by("ray-train"), AGENT, SEEN, "steps", N, "ray-train", "reported(train_func)"),
    "an engine": (
        ENGINE,
        AGENT,
        SEEN,
        "steps",
        N,
        "openrlhf-rollout",
        "name its metrics page in agent.yaml: engines: {servers: [{url: ..., replica: rollout/0}]}",
    ),
    "an engine of slime": (SGLANG_ENGINE, AGENT, SEEN, "steps", N, "slime-rollout", "SGLang with --enable-metrics"),
    "an engine's metrics": (ENGINE, SCRAPED, SEEN, "steps", P, "metrics of its engine", ""),
    "its phases": (ENGINE, SCRAPED, SEEN, "phases", P, "metrics of its engine", ""),
    "its hang": (ENGINE, SCRAPED, NAMED, "hang in a step", Y, "no new token", ""),
    "its lock": (ENGINE, SCRAPED, NAMED, "hang at a lock", P, "open requests", ""),
    "metrics of SGLang": (SGLANG_ENGINE, SCRAPED_SGLANG, SEEN, "steps", P, "metrics of its engine", ""),
    "a hang of SGLang": (SGLANG_ENGINE, SCRAPED_SGLANG, NAMED, "hang in a step", P, "stand still in healthy", ""),
    "its end": (ENGINE, SCRAPED, NAMED, "exit", P, "without the exception", ""),
    "no page": (UNREAD, AGENT, SEEN, "steps", N, "its state page cannot be read", "rolecall doctor"),
    "phases without a page": (UNREAD, AGENT, SEEN, "phases", N, "reports nothing", "rolecall doctor"),
    "no exception": (found_by("torchrun"), AGENT, NAMED, "exit", P, "without the exception", "rolecall exec"),
    "no hang": (found_by("torchrun"), AGENT, NAMED, "hang in a step", P, "stopped (5 s)", "rolecall exec"),
    "no lock": (found_by("torchrun"), AGENT, NAMED, "hang at a lock", N, "looks like one that waits", "rolecall exec"),
    "panels": (found_by("torchrun", 3), AGENT, NAMED, "slow", P, "differs from its 2 peers", "rolecall exec"),
    "too few for panels": (found_by("torchrun", 2), AGENT, NAMED, "slow", P, "starved", "rolecall exec"),
    "no dump": (
        *(found_by("torchrun"), AGENT, NAMED, "rank that holds up a collective"),
        *(N, "without the reporter", "rolecall exec"),
    ),
    # hooks
    "steps by hooks": (HOOKED, AGENT, SEEN, "steps", Y, "torch's hooks", ""),
    "phases by hooks": (HOOKED, AGENT, SEEN, "phases", Y, "step, wait", ""),
    "phases too short": (SHORT_STEPS, AGENT, SEEN, "phases", Y, "too short to be sampled", ""),
    "a hang by its deadline": (SHORT_STEPS, AGENT, NAMED, "hang in a step", Y, "deadline", ""),
    "between steps by stacks": (HOOKED, AGENT, NAMED, "hang between steps", Y, "stacks of the ranks", ""),
    "between steps without py-spy": (
        *(HOOKED, NO_STACKS, NAMED, "hang between steps"),
        *(P, "py-spy is not installed", "rolecall doctor"),
    ),
    "between steps without token": (HOOKED, NO_TOKEN, NAMED, "hang between steps", P, "token", "--credentials"),
    "between steps alone": (ALONE, AGENT, NAMED, "hang between steps", P, "no other rank waits", "two lines"),
    "a lock": (HOOKED, AGENT, NAMED, "hang at a lock", Y, "its line by its stack", ""),
    "a lock without its line": (HOOKED, NO_STACKS, NAMED, "hang at a lock", P, "not its line", "rolecall doctor"),
    "who is waited for": (HOOKED, AGENT, NAMED, "rank that holds up a collective", Y, "waits", ""),
    "torch's count": (COUNTED, NO_TOKEN, SEEN, "collectives", Y, "torch's count", ""),
    "one left out": (COUNTED, NO_TOKEN, NAMED, "rank that holds up a collective", P, "has left one out", "TORCH_FR"),
    "slow by its time": (HOOKED, AGENT, NAMED, "slow", Y, "against 3 peers", ""),
    "slow alone": (reporting(1, busy_seconds=9.0), AGENT, NAMED, "slow", P, "no peer", ""),
    "compiled": (COMPILED, AGENT, SEEN, "phases", N, "compiled", "two lines"),
    "a compiled hang by stacks": (COMPILED, AGENT, NAMED, "hang in a step", Y, "stacks of the ranks", ""),
    # two lines, integrations, the bundled runtime
    "steps by two lines": (TWO_LINES, AGENT, SEEN, "steps", Y, "the job's own calls", ""),
    "two lines between steps": (TWO_LINES, NO_TOKEN, NAMED, "hang between steps", Y, "the same between steps", ""),
    "no time of its own": (TWO_LINES, AGENT, SEEN, "own time of a step", N, "no time", "busy_seconds"),
    "time of whole steps": (IN_STEPS, AGENT, SEEN, "own time of a step", P, "includes what it waits", "collective()"),
    "slow by whole steps": (IN_STEPS, AGENT, NAMED, "slow", P, "differs from its 3 peers", "collective()"),
    "time beside collectives": (IN_COLLECTIVES, AGENT, SEEN, "own time of a step", Y, "without what it waits", ""),
    "time of one rank": (reporting(1, busy_seconds=9.0), AGENT, SEEN, "own time of a step", Y, "its own time", ""),
    "time by hooks": (HOOKED, AGENT, SEEN, "own time of a step", Y, "without what it waits", ""),
    "has only started": (STARTED, AGENT, SEEN, "steps", P, "none yet, from the integration", "first step"),
    "a first step": (STARTED, AGENT, NAMED, "hang in a step", P, "only started", "first steps"),
    "no values": (TWO_LINES, AGENT, NAMED, "values that are not finite", N, "reports none", "reporter.update"),
    "values": (VALUES, AGENT, NAMED, "values that are not finite", Y, "NaN", ""),
    "one rank": (STARTED, AGENT, SEEN, "collectives", NONE, "waits for no other", ""),
    "bundled": (BUNDLED, NO_TOKEN, NAMED, "hang between steps", Y, "runtime", ""),
    "bundled replaced": (BUNDLED, AGENT, REPLACED, "replica", Y, "its own runtime", ""),
    # devices
    "no GPU": (HOOKED, AGENT, NAMED, "GPU fault", NONE, "reads no GPU", "rolecall doctor"),
    "its GPU": (HOOKED, GPUS, SEEN, "GPU", Y, "1 GPU", ""),
    "faults of its GPU": (HOOKED, GPUS, NAMED, "GPU fault", Y, "from NVML", ""),
    "no kernel log": (HOOKED, GPUS, SEEN, "kernel log", N, "no permission", "rolecall doctor"),
    "another's GPU": (HOOKED[1:], GPUS, SEEN, "GPU", P, "none of them known", "hostPID"),
}


@pytest.mark.parametrize(("ranks", "node", "about", "name", "can", "because", "fix"), CASES.values(), ids=CASES)
def test_each_capability_has_its_reason_and_its_remedy(
    ranks: tuple[RankFacts, ...], node: NodeState, about: About, name: str, can: Can, because: str, fix: str
) -> None:
    found = of_first(ranks, node)[about, name]
    assert found.can is can and because in found.because, found
    assert fix in found.fix, found


@pytest.mark.parametrize("node", [SCRAPED, SCRAPED_SGLANG])
def test_no_metrics_page_is_asked_for_that_is_read(node: NodeState) -> None:
    assert "name its metrics page" not in str(of_first(ENGINE, node))


@pytest.mark.parametrize(
    ("setting", "can", "because"),
    [
        ("2000", Y, "Flight Recorder dumps"),
        ("", P, "torch's own default decides"),
        ("0", N, "Flight Recorder is off"),
    ],
)
def test_the_flight_recorder_is_that_of_the_environment(setting: str, can: Can, because: str) -> None:
    ranks = tuple(replace(r, flight_recorder=setting) for r in TWO_LINES)
    found = of_first(ranks)[SEEN, "collectives"]
    assert found.can is can and because in found.because
    assert can is Y or "TORCH_FR_BUFFER_SIZE=2000" in found.fix
    assert of_first(ranks, NO_TOKEN)[SEEN, "collectives"].can is (N if setting == "2000" else can)


def test_a_short_phase_in_which_one_rank_was_sampled_is_one_of_its_peers_too() -> None:
    ranks = (HOOKED[0], replace(HOOKED[1], samples=HOOKED[1].samples[:1]))
    first, second = capabilities(JobFacts(ranks=ranks, nodes=(AGENT,)))
    assert first.capabilities == second.capabilities, "both are one paragraph"


def test_peers_are_ranks_of_the_same_job() -> None:
    others = tuple(replace(r, job="4712", replica="trainer/8") for r in HOOKED)
    assert of_first((*HOOKED, *others))[NAMED, "slow"].because.endswith("against 3 peers")


# --- replaced ---------------------------------------------------------------------------------------------------------


def watched(mode: str = "observe", roles: str = "rollout") -> Any:
    return parse_watched({"recovery": {"mode": mode}, "roles": [roles], "actuator": {"kind": "processes"}})


ROLLOUTS = tuple(rank_of(sample(replica=f"rollout/{n}", rank=0), found_by="slime-rollout") for n in range(2))
DONE = Replacement(calls=("rolecall node end 40",))
SUPPORTED = frozenset({ActionKind.REPLACE_REPLICA})
REPLACEMENTS: dict[str, tuple[dict[str, Any], Can, str, str]] = {
    "no watch file": ({}, N, "no watch file is given", "--use-fault-tolerance"),
    "no actuator": ({"watched": parse_watched({})}, N, "names no actuator", "processes"),
    "another role": ({"watched": watched(roles="trainer")}, N, "role rollout is not in `roles`", "roles: [rollout]"),
    "observe": ({"watched": watched(), "replacements": {"rollout/0": DONE}}, P, "mode observe", "approve"),
    "act": ({"watched": watched("act"), "replacements": {"rollout/0": DONE}}, Y, "by 1 call of actuator processes", ""),
    "refused": (
        {"watched": watched(), "replacements": {"rollout/0": Replacement(refused="run_on_node must say")}},
        *(N, "refuses: run_on_node must say", "replace.md"),
    ),
    "more ends": (
        {"watched": watched("act"), "replacements": {"rollout/0": replace(DONE, also=("rollout/1",))}},
        *(Y, "with it ends rollout/1", ""),
    ),
    "another role ends": (
        {"watched": watched("act"), "replacements": {"rollout/0": replace(DONE, beyond=("trainer/0",))}},
        *(N, "trainer/0 would end with it", "name that role"),
    ),
    "not tried": ({"watched": watched()}, P, "not tried", "--dry-run"),
}


@pytest.mark.parametrize(("facts", "can", "because", "fix"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_replacement_is_that_of_the_watch_file(facts: dict[str, Any], can: Can, because: str, fix: str) -> None:
    found = of_first(ROLLOUTS, AGENT, supports=SUPPORTED, **facts)
    replica = found[REPLACED, "replica"]
    assert replica.can is can and because in replica.because and fix in replica.fix, replica
    moved = found[REPLACED, "replica, on another node"]
    assert moved.can is N and (can is N or "does not move" in moved.because)
    both = of_first(ROLLOUTS, AGENT, supports=SUPPORTED | {ActionKind.REPLACE_NODE}, **facts)
    assert both[REPLACED, "replica, on another node"].can is can


def test_ranks_of_one_torchrun_job_are_not_replaced_alone() -> None:
    facts = {"watched": watched("act", "trainer"), "replacements": {"trainer/0": DONE}, "supports": SUPPORTED}
    alone = of_first(found_by("torchrun"), **facts)[REPLACED, "replica"]
    assert alone.can is P and "only as a whole" in alone.because and "--max-restarts" in alone.fix
    groups = tuple(
        rank_of(sample(n, replica=f"trainer/{g}"), launcher="torchrun", job="4711") for g in range(2) for n in range(2)
    )
    assert of_first(groups, **facts)[REPLACED, "replica"].can is Y


# --- ended ------------------------------------------------------------------------------------------------------------

LOOKS = replace(AGENT, probes={"orphans": True})
TWO_NODES = (
    ROLLOUTS[0],
    replace(ROLLOUTS[1], process=ProcessId(node=NodeId("node-2"), pid=41, start_ticks=9)),
)
ENDS: dict[str, tuple[tuple[RankFacts, ...], NodeState, Any, Can, str, str]] = {
    "no watch file": (ROLLOUTS, LOOKS, None, N, "no watch file is given (--config): on-call", "orphans: {mode: act}"),
    "no section": (ROLLOUTS, LOOKS, {}, N, "has no `orphans`: on-call gets the command", "orphans: {mode: act}"),
    "no engine": (HOOKED, LOOKS, {}, NONE, "not known as an engine", ""),
    "not known as an engine": (HOOKED, LOOKS, {"orphans": {"mode": "act"}}, Y, "in mode act", ""),
    "act alone": (ROLLOUTS, LOOKS, {"orphans": {"mode": "act"}}, Y, "in mode act; not tried here", ""),
    "approve alone": (ROLLOUTS, LOOKS, {"orphans": {"mode": "approve"}}, Y, "in mode approve", ""),
    "no mode": (ROLLOUTS, LOOKS, {"orphans": {}}, P, "mode observe ends none", "orphans: {mode: approve}, then act"),
    "beside an actuator": (
        *(ROLLOUTS, LOOKS),
        {"orphans": {}, "recovery": {"mode": "act"}, "roles": ["rollout"], "actuator": {"kind": "processes"}},
        *(Y, "in mode act", ""),
    ),
    "the agent does not look": (
        *(ROLLOUTS, AGENT, {"orphans": {"mode": "act"}}),
        *(N, "its agent does not look for them", "agent.yaml"),
    ),
    "no way to a node": (
        *(TWO_NODES, LOOKS, {"orphans": {"mode": "act"}}),
        *(N, "the job runs on 2 nodes", 'orphans: {run_on_node: [ssh, "{node}"]}'),
    ),
    "a way to each node": (
        *(TWO_NODES, LOOKS, {"orphans": {"mode": "act", "run_on_node": ["ssh", "{node}"]}}),
        *(Y, "in mode act", ""),
    ),
    "bundled": (
        (rank_of(replace(sample(replica="rollout/0"), incarnation=3)),),
        *(LOOKS, None, N, "in a run of rolecall on-call gets the command", ""),
    ),
}


@pytest.mark.parametrize(("ranks", "node", "file", "can", "because", "fix"), ENDS.values(), ids=ENDS)
def test_whether_orphans_are_ended(
    ranks: tuple[RankFacts, ...], node: NodeState, file: Any, can: Can, because: str, fix: str
) -> None:
    watched = None if file is None else parse_watched(file)
    found = of_first(ranks, node, watched=watched)[About.ENDED, "orphaned processes of engines on its node"]
    assert found.can is can and because in found.because and fix in found.fix, found
    assert bool(found.fix) is (can in (P, N) and "in a run of rolecall" not in because)


@pytest.mark.parametrize(
    ("ranks", "fix"),
    [
        (found_by("slurm"), "kind: slurm"),
        (found_by("torchrun", slurm_step="4711.0", num_ranks=1), "kind: slurm"),
        (found_by("torchrun", pod_uid="x"), "kind: kubernetes"),
        (found_by("torchrun"), "torchft"),
        (found_by("verl-trainer"), "not replaced alone"),
        (found_by("verl-rollout", 1), "kind: verl"),
        (found_by("nemo-rl-rollout", 1), "generation_fleet_health"),
        (found_by("openrlhf-rollout", 1), "max_restarts"),
        (found_by("mine", 1), "kind: processes"),
    ],
)
def test_an_actuator_that_fits_is_proposed(ranks: tuple[RankFacts, ...], fix: str) -> None:
    assert fix in of_first(ranks)[REPLACED, "replica"].fix


# --- text and JSON ----------------------------------------------------------------------------------------------------


def test_ranks_that_can_the_same_are_one_paragraph_with_each_remedy_once() -> None:
    lost = NodeState(node="node-2", unreachable="http://node-2:9477: connection refused")
    facts = JobFacts(ranks=found_by("torchrun"), nodes=(AGENT, lost), other_jobs=("4712",), unknown_job=2)
    lines = as_text(rendering.job("4711", facts, capabilities(facts))).splitlines()
    assert lines[0] == "trainer/0 ranks 0-3 on node-1 (torchrun, job 4711; pid 40, 41, 42, 43)"
    assert [line for line in lines if not line.startswith(" ")][1:] == [
        "no answer http://node-2:9477: connection refused",
        "other jobs on these nodes: 4712",
        "2 processes of a job that is not known: --job all shows them",
    ]
    assert sum("-> start it with `rolecall exec" in line for line in lines) == 1
    found = capabilities(facts)[0].to_dict()
    assert found["step"] is None and found["pid"] == 40
    assert {c["about"] for c in found["capabilities"]} == set(About) and {"name", "can", "because", "fix"} < set(
        found["capabilities"][0]
    )


@pytest.mark.parametrize(
    ("nodes", "text"),
    [((AGENT,), "no rank of job 4711 runs on node-1"), ((NodeState(node="a", unreachable="x"),), "no agent answers")],
)
def test_nothing_seen_is_said_with_what_to_do(nodes: tuple[NodeState, ...], text: str) -> None:
    assert text in as_text(rendering.job("4711", JobFacts(nodes=nodes), ()))
