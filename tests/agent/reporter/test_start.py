"""`reporter.start()` and `reporter.step(n)`: all that a job needs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.processes.state_pages import PageReader, PageState, parse_page
from rolecall.agent.reporter.launcher import RankUnknown, launched_process
from rolecall.core.errors import InvalidId
from rolecall.core.ids import process_start_ticks
from rolecall.core.telemetry import UNCOUNTED, Phase
from tests.agent.processes import TOKEN, AgentProcess, Child
from tests.support import PATIENCE_SECONDS, eventually

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "TORCHELASTIC_RUN_ID": "abc",
    "ROLE_NAME": "default",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_ID": "77",
    "RAY_JOB_ID": "01000000",
}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "5", "SLURM_JOB_ID": "4711"}
LAUNCHED: dict[str, tuple[dict[str, str], dict[str, Any], tuple[object, ...]]] = {
    "torchrun under srun": (TORCHRUN, {}, ("trainer/0", 3, "torchrun", "abc", 8, 1)),
    "torchrun without a run id": ({"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, {}, ("trainer/0", 0, "torchrun", "", None, None)),
    "torchrun --role": ({"RANK": "0", "ROLE_NAME": "Critic"}, {}, ("critic/0", 0, "torchrun", "", None, None)),
    "srun": (SRUN, {}, ("trainer/0", 5, "srun", "4711", 16, 5)),
    "Ray with a rank": ({"RAY_JOB_ID": "01000000"}, {"rank": 2, "role": "rollout"}, ("rollout/0", 2, "ray", "01000000", None, None)),
    "Ray's runtime environment": (
        {"RAY_JOB_ID": "01000000", "ROLECALL_RANK": "4", "ROLECALL_ROLE": "rollout"},
        {},
        ("rollout/0", 4, "ray", "01000000", None, None),
    ),
    "the second job of a node": ({**SRUN, "ROLECALL_REPLICA": "trainer/1"}, {}, ("trainer/1", 5, "srun", "4711", 16, 5)),
    "no launcher": ({"RANK": "-1"}, {}, ("trainer/0", 0, "", "", None, None)),
    "arguments first": (
        {**TORCHRUN, "ROLECALL_RANK": "9", "ROLECALL_ROLE": "critic", "ROLECALL_REPLICA": "critic/2"},
        {"replica": "judge/1", "rank": 7, "world_size": 9, "local_rank": 0, "run_id": "mine"},
        ("judge/1", 7, "torchrun", "mine", 9, 0),
    ),
}  # fmt: skip


def test_the_replicas_of_torchft_say_what_makes_them_one_job() -> None:
    environ = {**TORCHRUN, "TORCHFT_LIGHTHOUSE": "http://head:29510"}
    assert launched_process(environ).detail() == {
        **launched_process(TORCHRUN).detail(),
        "lighthouse": "http://head:29510",
    }


@pytest.mark.parametrize("name", LAUNCHED)
def test_what_a_launcher_says(name: str) -> None:
    environ, arguments, expected = LAUNCHED[name]
    it = launched_process(environ, **arguments)
    assert (it.replica, it.rank, it.launcher, it.run_id, it.world_size, it.local_rank) == expected


def test_what_no_launcher_says_is_refused_with_what_to_do() -> None:
    with pytest.raises(RankUnknown, match=r"reporter\.start\(rank=\.\.\.\) or set ROLECALL_RANK"):
        launched_process({"RAY_JOB_ID": "01000000"})
    with pytest.raises(InvalidId):
        launched_process({}, role="My Role")


def test_its_import_is_standard_library_only() -> None:
    code = """
import sys
before = set(sys.modules)
from rolecall import reporter
foreign = {m.partition(".")[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names) - {"rolecall"}
assert not foreign, foreign
assert "asyncio" not in sys.modules and "rolecall.core.telemetry" not in sys.modules
assert set(reporter.__all__) == {n for n in vars(reporter) if not n.startswith("_")}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)


def test_the_reporters_phases_are_those_of_telemetry() -> None:
    from rolecall.agent.reporter import reporter

    assert (reporter.PHASE_START, reporter.PHASE_STEP) == (Phase.START, Phase.STEP) and UNCOUNTED == 0


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    it = Child(tmp_path / "agent")
    it.do(f"os.environ['ROLECALL_AGENT_DIR'] = {str(tmp_path / 'agent')!r}")
    yield it
    it.close()


def _page(child: Child, tmp_path: Path) -> PageState:
    child.do(f"open({str(tmp_path / 'page')!r}, 'wb').write(reporter.page_bytes())")
    return parse_page((tmp_path / "page").read_bytes())


def test_without_an_agent_one_warning_and_on(child: Child, tmp_path: Path) -> None:
    child.do("reporter.BEAT_SECONDS = 0.001; reporter.BEATS_PER_AGENT_CHECK = 1; reporter.start()")
    child.do("exec('for n in range(5):\\n with reporter.step(n): pass')")
    child.do("reporter.searches, reporter.search = [], reporter._find_agent")
    child.do("reporter._find_agent = lambda: (reporter.searches.append(1), reporter.search())[1]")
    child.do("exec('import time\\nwhile len(reporter.searches) < 12: time.sleep(0.001)')")
    page = _page(child, tmp_path)
    assert (page.step, page.progress, page.work_units, page.phase) == (4, 5, 5, "step")
    warning = child.close()
    assert (
        warning.count("\n") == 1 and f"no agent runs at {tmp_path / 'agent'} (`rolecall agent` starts one)" in warning
    )


def test_an_agent_that_starts_later_is_found(child: Child, tmp_path: Path) -> None:
    child.do("reporter.BEAT_SECONDS = 0.01; reporter.BEATS_PER_AGENT_CHECK = 1; os.environ['RANK'] = '3'")
    child.do("reporter.start(); s = reporter.step(5); s.__enter__(); s.__exit__(None, None, None)")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "token").write_text(TOKEN + "\n")
    agent = AgentProcess(tmp_path / "agent")
    try:
        eventually(lambda: agent.newest("trainer/0"), "it registers")
        sample = agent.newest("trainer/0")
        assert sample is not None
        assert [sample[k] for k in ("rank", "incarnation", "step", "progress", "phase")] == [3, 0, 5, 1, "step"]
        [event] = [e for e in agent.events() if e["kind"] == "registered"]
        assert event["detail"] == {"launcher": "torchrun", "launcher_pid": str(os.getpid())}
    finally:
        agent.close()


def test_who_reports_and_the_flight_recorders_setting_are_told(
    agent: AgentProcess, child: Child, tmp_path: Path
) -> None:
    child.do("os.environ['TORCH_NCCL_TRACE_BUFFER_SIZE'] = '0'; reporter.start(source='hooks')")
    eventually(lambda: [e for e in agent.events() if e["kind"] == "registered"], "it registers")
    (event,) = [e for e in agent.events() if e["kind"] == "registered"]
    assert event["detail"] == {"source": "hooks", "flight_recorder": "0"}


def _run(code: str, agent_dir: Path, **environ: str) -> tuple[int, str]:
    """Exit code and stderr of a job."""
    header = "import os, sys, time\nfrom rolecall import reporter\nreporter.start()\n"
    done = subprocess.run(
        [sys.executable, "-c", header + code],
        env={**os.environ, "ROLECALL_AGENT_DIR": str(agent_dir), **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    data = tmp_path / "agent"
    data.mkdir()
    (data / "token").write_text(TOKEN)
    it = AgentProcess(data)
    yield it
    it.close()


ENDS = {
    # code: exit code, cause of the exit, events between registration and exit
    "pass": (0, "finished", ["finished"]),
    "sys.exit(3)": (3, "exit", []),
    "reporter.finish('enough'); sys.exit(3)": (3, "finished", ["finished"]),
    "with reporter.step(4): raise ValueError('bad batch')": (
        1,
        "exception",
        ["exception", "exception"],
    ),  # and uncaught
    "raise ValueError('bad batch')": (1, "exception", ["exception"]),
    "os.kill(os.getpid(), 15)": (-15, "finished", ["finished"]),
    "os.kill(os.getpid(), 9)": (-9, "killed", []),
}


def test_how_a_job_ends(agent: AgentProcess, tmp_path: Path) -> None:
    """One after the other in the place of one rank, as a job that is started again and again."""
    seen = 1  # agent_started
    for code, (exit_code, cause, between) in ENDS.items():
        wait = "from rolecall.agent.reporter import reporter as r; r._client.flush(60)\n"
        returned, said = _run(wait + code, tmp_path / "agent", RANK="2", WORLD_SIZE="4")
        assert returned == exit_code, said
        eventually(lambda seen=seen: [e for e in agent.events(after=seen) if e["kind"] == "exited"], code)
        events = agent.events(after=seen)
        seen = events[-1]["seq"]
        assert [e["kind"] for e in events] == ["registered", *between, "exited"], code
        assert {(e["replica"], e["rank"], e["incarnation"]) for e in events} == {("trainer/0", 2, UNCOUNTED)}
        assert events[-1]["detail"]["cause"] == cause, code
        if between == ["exception"]:
            assert "ValueError: bad batch" in said  # it went on to the interpreter
            assert events[1]["detail"]["message"] == "bad batch"


def test_a_second_job_in_the_same_place_is_refused_and_goes_on(agent: AgentProcess, tmp_path: Path) -> None:
    first = Child(tmp_path / "agent")
    try:
        first.do(f"reporter.start(node_dir={str(tmp_path / 'agent')!r})")
        eventually(lambda: agent.newest("trainer/0"), "the first registers")
        wait = "from rolecall.agent.reporter import reporter as r; r._client.flush(60)\n"
        code, said = _run(wait + "with reporter.step(1): print('on')", tmp_path / "agent")
        assert code == 0 and said.count("the agent refused register: trainer/0:0#0 is process") == 1
        assert _run(wait, tmp_path / "agent", ROLECALL_REPLICA="trainer/1") == (0, "")
    finally:
        first.close()


def test_a_rank_registers_once_the_former_process_of_its_place_has_ended(agent: AgentProcess, tmp_path: Path) -> None:
    start = f"reporter.start(node_dir={str(tmp_path / 'agent')!r})"
    former, second = Child(tmp_path / "agent"), Child(tmp_path / "agent")
    try:
        former.do(start)
        eventually(lambda: agent.newest("trainer/0"), "the former registers")
        second.do("from rolecall.agent.reporter import sender; sender.AGENT_CHECK_SECONDS = 0.05", start)
        assert "the agent refused register: trainer/0:0#0 is process" in second.warning()
        former.close()
        eventually(
            lambda: (newest := agent.newest("trainer/0")) is not None and newest["process"]["pid"] == second.pid,
            "the second takes its place",
        )
    finally:
        former.close()
        assert second.close() == "", "it was told once"


def test_a_step_is_one_unit_without_its_collectives(child: Child, tmp_path: Path) -> None:
    child.do("reporter.monotonic = iter(range(1000)).__next__")  # a second at each look
    child.do(
        "s = reporter.step(1); s.__enter__(); c = reporter.collective(); c.__enter__(); reporter.s, reporter.c = s, c"
    )
    inside = _page(child, tmp_path)
    assert (inside.phase, inside.progress) == ("reduce", 0)
    child.do("[reporter.monotonic() for _ in range(100)]; reporter.c.__exit__(None, None, None)")
    child.do("reporter.s.__exit__(None, None, None)")
    page = _page(child, tmp_path)
    assert (page.phase, page.progress, page.work_units) == ("step", 1, 1) and 0 < page.busy_seconds < 10


def test_a_job_that_reports_more_is_left_alone(child: Child, tmp_path: Path) -> None:
    child.do(
        "s = reporter.step(1); s.__enter__(); reporter.progress(4, busy_seconds=2.0); s.__exit__(None, None, None)"
    )
    page = _page(child, tmp_path)
    assert (page.phase, page.progress, page.busy_seconds) == ("step", 4, 2.0)
    child.do("reporter.enter_phase('wait'); s = reporter.step(2); s.__enter__(); s.__exit__(None, None, None)")
    page = _page(child, tmp_path)
    assert (page.phase, page.step, page.progress) == ("wait", 2, 4)


@pytest.mark.parametrize("raised", ["KeyboardInterrupt()", "SystemExit(0)", "GeneratorExit()"])
def test_an_intended_end_in_a_step_is_no_exception(child: Child, tmp_path: Path, raised: str) -> None:
    child.do("reporter.s = reporter.step(1); reporter.s.__enter__()")
    child.do(f"e = {raised}; reporter.s.__exit__(type(e), e, None)")
    assert _page(child, tmp_path).exception is None


def test_an_exception_that_the_job_catches_is_reported_and_the_next_step_counts(child: Child, tmp_path: Path) -> None:
    code = """
def train(n):
    with reporter.step(n):
        if n == 1: raise ValueError(n)
for n in range(3):
    try: train(n)
    except ValueError: pass
"""
    child.do(f"exec({code!r}, {{'reporter': reporter}})")
    page = _page(child, tmp_path)
    assert (page.step, page.progress) == (2, 2)
    assert page.exception is not None and (page.exception.step, page.exception.message) == (1, "1")


def test_a_fork_inside_a_step_leaves_parent_and_child_working(agent: AgentProcess, tmp_path: Path) -> None:
    code = """
from rolecall.agent.reporter import reporter as r
r._client.flush(60)
with reporter.step(1):
    child = os.fork()
if not child:
    with reporter.step(100): pass
    try:
        with reporter.step(101): raise ValueError
    except ValueError: pass
    sys.exit(0)  # with the reporter's work at exit
assert os.waitpid(child, 0)[1] == 0
"""
    assert _run(code, tmp_path / "agent") == (0, "")
    eventually(lambda: agent.events()[-1]["kind"] == "exited", "the parent's exit is seen")
    kinds = [e["kind"] for e in agent.events()]
    assert kinds == ["agent_started", "registered", "finished", "exited"]
    assert agent.events()[-1]["detail"]["step"] == "1"


@pytest.mark.parametrize("existing", ["symlink", "directory"])
def test_a_page_is_never_written_through_a_link(tmp_path: Path, existing: str) -> None:
    child = Child(tmp_path)
    (tmp_path / "pages").mkdir()
    other = tmp_path / "other"
    other.write_text("precious")
    name = f"{child.pid}-{process_start_ticks(child.pid)}.page"
    if existing == "symlink":
        (tmp_path / "pages" / name).symlink_to(other)
    else:
        (tmp_path / "pages" / name).mkdir()
    child.start("trainer/0")
    child.do("reporter.progress()")
    assert "cannot create the state page" in child.close() and other.read_text() == "precious"


def test_the_page_may_be_read_by_the_group_whatever_the_umask(tmp_path: Path) -> None:
    child = Child(tmp_path)
    child.do("os.umask(0o077)")
    child.start("trainer/0")
    assert child.page.stat().st_mode & 0o777 == 0o640
    assert PageReader(child.page).read().replica == "trainer/0"
    child.close()


def test_details_of_a_registration_are_bounded(agent: AgentProcess, tmp_path: Path) -> None:
    child = Child(tmp_path / "agent")
    child.do(f"reporter.start(run_id='x' * 300, node_dir={str(tmp_path / 'agent')!r})")
    assert "detail must be strings of at most 200 characters" in child.warning()
    child.close()
    assert json.loads((tmp_path / "agent" / "registrations.json").read_text()) == []
