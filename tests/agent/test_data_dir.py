"""The agent's data directory: its place, its token, and who may register."""

import contextlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.daemon import main
from rolecall.agent.data_dir import data_dirs_of_jobs, default_data_dir, refuse_foreign, token_of
from rolecall.agent.node import Agent, AgentSettings, DirectoryInUse
from rolecall.core.errors import ConfigError
from rolecall.core.ids import NodeId
from rolecall.core.rundir import bearer_token
from tests.support import PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("euid", "environ", "expected", "of_jobs"),
    [
        (0, {"XDG_STATE_HOME": "/x", "HOME": "/root"}, "/var/lib/rolecall", 1),
        (0, {"ROLECALL_AGENT_DIR": "/tmp/agent"}, "/tmp/agent", 1),
        (1000, {"ROLECALL_AGENT_DIR": "/tmp/agent", "HOME": "/home/anna"}, "/tmp/agent", 1),
        (1000, {"XDG_STATE_HOME": "/x", "HOME": "/home/anna"}, "/x/rolecall", 2),
        (1000, {"XDG_STATE_HOME": "relative", "HOME": "/home/anna"}, "/home/anna/.local/state/rolecall", 2),
        (1000, {"HOME": "/home/anna"}, "/home/anna/.local/state/rolecall", 2),
    ],
)
def test_where_data_goes_and_jobs_look(euid: int, environ: dict[str, str], expected: str, of_jobs: int) -> None:
    assert default_data_dir(euid, environ) == Path(expected)
    assert data_dirs_of_jobs(euid, environ) == (Path(expected), Path("/var/lib/rolecall"))[:of_jobs]


def test_of_two_agents_that_start_at_once_both_have_the_same_token(tmp_path: Path) -> None:
    """The second one finds the directory taken only afterwards: what the first one reads must stay."""
    reported: list[str] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        reported.append(token_of(tmp_path / "data"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert len(reported) == 8 and set(reported) == {(tmp_path / "data" / "token").read_text().strip()}
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["token"]


def test_the_token_of_another_file_replaces_that_of_the_directory_unless_an_agent_uses_it(tmp_path: Path) -> None:
    token_of(tmp_path)
    settings = AgentSettings(node=NodeId("node-1"), data_dir=tmp_path, token="of several", group_registers=True)
    agent = Agent(settings)
    assert (tmp_path / "token").read_text() == "of several\n"
    with pytest.raises(DirectoryInUse):
        Agent(replace(settings, token="another"))
    assert token_of(tmp_path) == "of several"
    agent.stop()
    agent.run()


def test_directory_and_token_are_readable_for_the_group_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        token_of(tmp_path / "data")
    finally:
        os.umask(before)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "data" / "token").stat().st_mode & 0o777 == 0o640


def test_a_directory_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    token_of(tmp_path / "data")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 4711, 4711)
    owner = tmp_path.stat().st_uid
    for euid in (0, owner):
        refuse_foreign(tmp_path, euid)
    with pytest.raises(ConfigError, match="belongs to user"):
        refuse_foreign(tmp_path, owner + 1)
    refuse_foreign(Path("/"), 4712)  # root's may be anybody's
    refuse_foreign(tmp_path / "none", 4712)  # the agent creates it


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="empty; remove it"):
        token_of(tmp_path)


def test_the_command_prints_the_token_and_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data-dir", str(tmp_path / "data")]
    assert main(["token", *data]) == 0
    said = capsys.readouterr()
    token = (tmp_path / "data" / "token").read_text()
    assert said.out == token and said.err.startswith(f"{tmp_path / 'data' / 'token'} (mode 0640, group ")
    assert main(["token", "--bearer", *data]) == 0
    assert capsys.readouterr().out == f"bearer {bearer_token(token.strip())}\n"
    other = tmp_path / "other"
    other.write_text("of several agents\n")
    assert main(["token", "--token-file", str(other), *data]) == 0
    said = capsys.readouterr()
    assert said.out == "of several agents\n" and said.err.startswith(f"{other} (mode ")


@pytest.mark.parametrize("wrong", [["--bearer"], ["tokens"]])
def test_other_words_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2


def test_the_agents_help_shows_no_option_of_the_bundled_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "--data-dir" in shown
    assert not any(internal in shown for internal in ("ranks-only", "raylet", "parent-", "--proc"))


NORMAL_USER = 54321


def _python_of_others() -> tuple[str, str]:
    """An interpreter that other users may run, and its PYTHONPATH: pytest's own may be in a home directory."""
    path = os.pathsep.join(p for p in sys.path if p)
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            command = [python, "-c", "import rolecall.agent.settings, uvicorn"]
            who: dict[str, Any] = (
                {} if os.geteuid() else {"user": NORMAL_USER, "group": NORMAL_USER, "extra_groups": []}
            )
            if not subprocess.run(command, env={"PYTHONPATH": path}, check=False, timeout=60, **who).returncode:
                return python, path
    pytest.skip("no Python here that another user may run")


def test_alone_it_runs_as_a_normal_user_on_a_node_without_gpus(tmp_path: Path) -> None:
    """In a network of its own, because the port is the default one."""
    home = tmp_path / "home"
    home.mkdir()
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    user = []
    if os.geteuid() == 0:
        os.chown(home, NORMAL_USER, NORMAL_USER)
        network = ["unshare", "--net"]
        user = ["setpriv", f"--reuid={NORMAL_USER}", f"--regid={NORMAL_USER}", "--clear-groups"]
    else:
        network = ["unshare", "--user", "--map-current-user", "--keep-caps", "--net"]
    loopback = [*network, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*loopback, *user, "true"], check=False, capture_output=True, timeout=30).returncode:
        pytest.skip("no network namespaces here")
    python, path = _python_of_others()
    code = "import sys; from rolecall.cli.main import main; sys.exit(main(['agent']))"
    agent = subprocess.Popen(
        [*loopback, *user, python, "-c", code],
        env={"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(PATIENCE_SECONDS, agent.kill)
    timer.start()
    try:
        assert agent.stderr is not None
        said = []
        for line in agent.stderr:
            said.append(line)
            if "serves at" in line:
                agent.terminate()
        assert agent.wait() == 0, said
    finally:
        timer.cancel()
        agent.kill()
        agent.communicate()
    assert any("serves at http://127.0.0.1:9477" in line for line in said)
    data = home / ".local" / "state" / "rolecall"
    assert (data / "token").stat().st_mode & 0o777 == 0o640 and (data / "events.jsonl").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
@pytest.mark.parametrize("token_of_the_cluster", [False, True])
def test_a_job_of_another_user_of_the_agents_group_registers(tmp_path: Path, token_of_the_cluster: bool) -> None:
    group, others = 54300, {"agent": 54301, "job": 54302, "stranger": 54303}
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    home = tmp_path / "var"
    home.mkdir()
    os.chown(home, others["agent"], group)
    data = home / "rolecall"
    python, path = _python_of_others()
    environ = {**os.environ, "ROLECALL_AGENT_DIR": str(data), "HOME": str(home), "PYTHONPATH": path}
    options = []
    if token_of_the_cluster:
        (tmp_path / "shared").write_text("of several agents\n")
        (tmp_path / "shared").chmod(0o600)
        os.chown(tmp_path / "shared", others["agent"], group)
        options = ["--token-file", str(tmp_path / "shared")]
    agent = subprocess.Popen(
        [python, "-m", "rolecall.agent", "--port", "0", *options],
        user=others["agent"],
        group=group,
        extra_groups=[],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = """
from rolecall.agent.reporter import reporter
reporter.start(rank=3)
with reporter.step(7): pass
if reporter._client is not None:
    reporter._client.flush(60)
"""

    def run_job(name: str, in_group: int) -> str:
        done = subprocess.run(
            [python, "-c", job],
            user=others[name],
            group=in_group,
            extra_groups=[],
            env=environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        return done.stderr

    try:
        assert agent.stderr is not None
        for line in agent.stderr:
            if "serves at" in line:
                break
        assert run_job("job", group) == ""
        assert "does not watch this process yet" in run_job("stranger", 54399)
    finally:
        agent.terminate()
        agent.communicate(timeout=PATIENCE_SECONDS)
    events = (data / "events.jsonl").read_text()
    assert '"trainer/0"' in events and '"registered"' in events and '"refused"' not in events
    assert '"step":"7"' in events, "its page was read"
