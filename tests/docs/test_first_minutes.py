"""README's three commands, run exactly as they stand there, on a real torchrun job of which one rank is stopped."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.agent.processes.state_pages import PageReader
from tests.docs.pages import ROOT
from tests.support import eventually

SECTION = "## Watch the job you already run, in three commands"
NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
MACHINE = [*NAMESPACES, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""The agent takes its default port and looks at all processes: in namespaces of the test's own nobody else has the port,
and no other job runs. PIDs are those of the namespace."""


START_SECONDS = 150.0
"""torch is imported by torchrun and by each rank; on a busy machine each import takes half a minute."""


def three_commands() -> list[str]:
    section = (ROOT / "README.md").read_text().partition(SECTION)[2]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return [line.partition("#")[0].strip() for line in block.group(1).splitlines()]


def like_a_clone(folder: Path) -> dict[str, str]:
    """Makes `folder` look like a clone; the environment in which `rolecall` and `torchrun` are those of this Python."""
    tools = folder / "bin"
    tools.mkdir()
    for name, module in (("rolecall", "rolecall"), ("torchrun", "torch.distributed.run")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (tools / name).chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    return {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # Root's agent would use the machine's own directory.
        "ROLECALL_AGENT_DIR": str(folder / "agent"),
    }


def test_they_are_three() -> None:
    agent, job, watch = three_commands()
    assert agent == "rolecall agent" and job.startswith("torchrun ") and watch.startswith("rolecall watch agents ")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A shell in a folder that looks like a clone, with `rolecall` and `torchrun` of this environment."""
    if subprocess.run([*MACHINE, "true"], check=False, capture_output=True, timeout=30).returncode:
        pytest.skip("no namespaces here")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    shell = subprocess.Popen(
        [*MACHINE, "bash"],
        cwd=tmp_path,
        env=like_a_clone(tmp_path),
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield shell
    shell.kill()  # and with the first process of the namespace all of its processes
    shell.communicate()


@pytest.mark.slow
def test_a_stopped_rank_is_named(terminal: subprocess.Popen[str], tmp_path: Path) -> None:
    assert terminal.stdin is not None

    def enter(command: str, log: str) -> None:
        assert terminal.stdin is not None
        terminal.stdin.write(f"{command} > {log} 2>&1 &\n")
        terminal.stdin.flush()

    agent, job, watch = three_commands()
    enter(agent, "agent.log")
    eventually(lambda: "serves at http://127.0.0.1:9477" in _read(tmp_path / "agent.log"), "the agent serves")
    enter(job, "job.log")
    enter(watch, "watch.log")
    events = tmp_path / "agent" / "events.jsonl"
    eventually(lambda: _registered(events, rank=1), "rank 1 registers", seconds=START_SECONDS)
    pid = _registered(events, rank=1)
    eventually(lambda: _registered(events, rank=0), "rank 0 registers")
    for one in (pid, _registered(events, rank=0)):
        [page] = (tmp_path / "agent" / "pages").glob(f"{one}-*.page")
        reader = PageReader(page)
        eventually(lambda reader=reader: reader.read().step >= 30, "it trains; deadlines are learned")
        reader.close()
    terminal.stdin.write(f"kill -STOP {pid}\n")
    terminal.stdin.write(
        "until rolecall incidents inc-1-trainer-0 --run my-job | grep -q 'evidence coll'; do sleep 1; done\n"
    )
    terminal.stdin.write("rolecall incidents --run my-job > incidents.log\n")
    terminal.stdin.write("rolecall incidents inc-1-trainer-0 --run my-job > incident.log\n")
    terminal.stdin.write("rolecall status --run my-job > status.log\necho done > ended\n")
    terminal.stdin.flush()
    eventually((tmp_path / "ended").exists, "the incident is listed, with evidence", seconds=START_SECONDS)
    told = _read(tmp_path / "incidents.log")
    assert "trainer/0 rank 1" in told and "is hung: no progress in step " in told and "process stopped" in told, told
    assert "trainer/0 (" not in told, "rank 0 only waits"
    assert "no evidence was requested" not in _read(tmp_path / "incident.log"), "the local agent's token is used"
    assert f"trainer/0 rank 1  pid {pid} " in _read(tmp_path / "status.log")
    watched = json.loads([line for line in _read(tmp_path / "watch.log").splitlines() if '"watching"' in line][-1])
    assert [r["pid"] for r in watched["ranks"] if r["rank"] == 1] == [pid]


def _registered(events: Path, rank: int) -> int:
    """PID of the rank that registered itself; 0: none did."""
    for event in map(json.loads, _read(events).splitlines()):
        if event["kind"] == "registered" and event["rank"] == rank and "launcher" in event["detail"]:
            return int(event["process"]["pid"])
    return 0


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
