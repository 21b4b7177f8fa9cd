"""deploy/slurm: prolog, epilog and task prolog with other programs in PATH, with a real agent, and under a real Slurm.

`setpriv` is one that changes nothing: tests need no root. The real Slurm runs as root, with the real one.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.testing.slurm_cluster import SlurmCluster, missing
from tests.support import PATIENCE_SECONDS, eventually

SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"
NAMES = ("prolog.sh", "epilog.sh", "task-prolog.sh")
SHELLS = [shell for shell in ("dash", "bash", "sh") if shutil.which(shell)]
SETPRIV = '#!/bin/sh\necho "$@" >> "$CALLS/setpriv"\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
AGENT = '#!/bin/sh\necho "$@" > "$CALLS/agent.tmp"\nmv "$CALLS/agent.tmp" "$CALLS/agent"\n'


class Node:
    """A node on which the scripts run as slurmd runs them: with an environment of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.calls, self.runs = folder, folder / "bin", folder / "calls", folder / "runs"
        for made in (self.bin, self.calls):
            made.mkdir()
        self.program("setpriv", SETPRIV)
        self.program("logger", '#!/bin/sh\necho "$@" >> "$CALLS/log"\n')
        self.agent = self.program("rolecall", AGENT)
        self.settings = folder / "settings"
        self.set()

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def set(self, more: str = "") -> None:
        self.settings.write_text(f"ROLECALL_PROGRAM={self.agent}\nROLECALL_RUN_DIR={self.runs}\n{more}\n")

    def run(self, name: str, *, shell: str = "sh", **environ: str) -> str:
        """What it prints. It ends with 0 and prints nothing else."""
        known = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": str(os.getuid()), "SLURM_JOB_GID": str(os.getgid())}
        done = subprocess.run(
            [shell, str(SCRIPTS / name)],
            env={
                "PATH": f"{self.bin}:/usr/sbin:/usr/bin:/sbin:/bin",
                "CALLS": str(self.calls),
                "ROLECALL_SLURM_SETTINGS": str(self.settings),
                "SLURMD_NODENAME": "n1",
                **known,
                **environ,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done
        return done.stdout

    def called(self, name: str) -> str:
        path = self.calls / name
        return path.read_text().strip() if path.exists() else ""

    @property
    def dir(self) -> Path:
        return self.runs / "job-4711"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", NAMES)
def test_each_shell_can_read_it(name: str, shell: str) -> None:
    script = SCRIPTS / name
    assert os.access(script, os.X_OK) and script.read_text().startswith("#!/bin/sh\n")
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_prolog_starts_the_agent_as_the_jobs_user(node: Node, shell: str) -> None:
    node.set('ROLECALL_AGENT_OPTIONS="--host 0.0.0.0 --port 9478"')
    assert node.run("prolog.sh", shell=shell) == ""
    eventually(lambda: node.called("agent"), "the agent is started")
    assert node.called("agent") == f"agent --node n1 --data-dir {node.dir} --host 0.0.0.0 --port 9478"
    who = f"--reuid {os.getuid()} --regid {os.getgid()} --init-groups --"
    assert node.called("setpriv").startswith(who)
    assert node.dir.stat().st_mode & 0o777 == 0o750 and (node.dir / "agent.log").stat().st_mode & 0o077 == 0


def test_it_does_not_wait_for_the_agent(node: Node) -> None:
    node.program("rolecall", '#!/bin/sh\necho $$ > "$CALLS/pid"\nexec sleep 60\n')
    node.run("prolog.sh")
    eventually(lambda: node.called("pid"), "it runs on")
    os.kill(int(node.called("pid")), signal.SIGKILL)


MISSING = {
    "no program": ("ROLECALL_PROGRAM=/no/such/program", {}, "/no/such/program is not there"),
    "no job": ("", {"SLURM_JOB_ID": ""}, "no job or user number"),
    "no number of a job": ("", {"SLURM_JOB_ID": "../x"}, "no job or user number"),
    "no user": ("", {"SLURM_JOB_UID": ""}, "no job or user number"),
    "no folder": ("ROLECALL_RUN_DIR=/proc/none", {}, "/proc/none cannot be created"),
}


@pytest.mark.parametrize(("settings", "environ", "said"), MISSING.values(), ids=MISSING)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_fails_no_job(node: Node, name: str, settings: str, environ: dict[str, str], said: str) -> None:
    node.set(settings)
    assert node.run(name, **environ) == ""
    assert not node.called("agent") and not node.called("setpriv")
    assert name != "prolog.sh" or said in node.called("log")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", ["if then", "exit 3", "false"])
def test_settings_that_are_no_shell_file_fail_no_job(node: Node, name: str, shell: str, settings: str) -> None:
    node.settings.write_text(settings + "\n")
    node.run(name, shell=shell, ROLECALL_RUN_DIR=str(node.runs), ROLECALL_PROGRAM="/no/such/program")


@pytest.mark.parametrize("absent", ["setpriv", "setsid", "logger"])
def test_a_program_that_fails_fails_no_job(node: Node, absent: str) -> None:
    node.program(absent, "#!/bin/sh\nexit 1\n")
    node.run("prolog.sh")
    node.run("epilog.sh")


def test_the_tasks_are_told_where_their_agent_is(node: Node) -> None:
    assert node.run("task-prolog.sh") == ""
    node.dir.mkdir(parents=True)
    assert node.run("task-prolog.sh") == f"export ROLECALL_AGENT_DIR={node.dir}\n"
    assert node.run("task-prolog.sh", ROLECALL_AGENT_DIR="/mine") == "", "the job's own wins"


def test_the_epilog_ends_no_process_that_is_not_the_agent(node: Node) -> None:
    node.dir.mkdir(parents=True)
    other = subprocess.Popen(["sleep", "60"])
    try:
        (node.dir / "pids").write_text(f"{other.pid}\n-1\n1 {other.pid}\n$(touch {node.folder}/x)\n")
        node.run("epilog.sh")
        assert other.poll() is None and not node.dir.exists() and not (node.folder / "x").exists()
    finally:
        other.kill()
        other.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("trapped", ["", "trap '' TERM\n"], ids=["ends", "reads no SIGTERM"])
def test_the_epilog_ends_an_agent_that_has_only_started(node: Node, trapped: str) -> None:
    node.program("rolecall", f'#!/bin/sh\n{trapped}echo $$ > "$CALLS/pid"\nwhile :; do sleep 0.1; done\n')
    node.run("prolog.sh")
    eventually(lambda: node.called("pid"), "it runs")
    pid = int(node.called("pid"))
    node.run("epilog.sh")
    assert not node.dir.exists()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "it has ended")


def test_the_epilog_follows_no_link_of_the_user(node: Node) -> None:
    node.dir.mkdir(parents=True)
    kept = node.folder / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    (node.dir / "link").symlink_to(kept)
    node.run("epilog.sh")
    assert (kept / "file").exists() and not node.dir.exists()


def real_agent(node: Node) -> None:
    node.program("rolecall", f'#!/bin/sh\n[ "$1" = agent ] && shift\nexec {sys.executable} -m rolecall.agent "$@"\n')
    config = node.folder / "agent.yaml"
    config.write_text("kernel_log: {enabled: false}\njobs: {enabled: false}\ngpu: {enabled: false}\n")
    node.set(f'ROLECALL_AGENT_OPTIONS="--port 0 --config {config}"')


def test_a_real_agent_runs_from_prolog_to_epilog(node: Node) -> None:
    real_agent(node)
    node.run("prolog.sh", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    pid = _agent_of(node.dir)
    node.run("prolog.sh", PYTHONPATH=os.environ.get("PYTHONPATH", ""))  # a second time, as after a restart of slurmd
    eventually(lambda: "another agent" in (node.dir / "agent.log").read_text(), "the second one ends")
    assert _agent_of(node.dir) == pid
    node.run("epilog.sh")
    assert not node.dir.exists() and not Path(f"/proc/{pid}/exe").exists()


def _agent_of(folder: Path) -> int:
    """PID of the agent that serves there."""
    found = folder / "agent.json"
    eventually(found.exists, "the agent serves")
    return int(json.loads(found.read_text())["pid"])


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_the_agent_is_another_users_process(node: Node) -> None:
    (node.bin / "setpriv").unlink()
    with tempfile.TemporaryDirectory(prefix="rolecall-slurm-") as folder:  # one that any user may enter
        Path(folder).chmod(0o755)
        node.runs, node.agent = Path(folder) / "runs", Path(folder) / "agent"
        node.agent.write_text("#!/bin/sh\nid -u > who.tmp; id -g >> who.tmp; mv who.tmp who\n")
        node.agent.chmod(0o755)
        node.set()
        node.run("prolog.sh", SLURM_JOB_UID="65534", SLURM_JOB_GID="65534")
        who = node.dir / "who"
        eventually(who.exists, "the agent ran")
        assert who.read_text().split() == ["65534", "65534"]
        assert {p.stat().st_uid for p in (node.dir, who, node.dir / "agent.log")} == {65534}
        node.run("epilog.sh", SLURM_JOB_UID="65534", SLURM_JOB_GID="65534")
        assert not node.dir.exists() and node.runs.is_dir()


@pytest.fixture
def cluster(node: Node) -> Iterator[SlurmCluster]:
    """One whose nodes run the scripts."""
    real_agent(node)
    for name in NAMES:  # slurmd passes on no variable of ours
        text = f"export ROLECALL_SLURM_SETTINGS={node.settings} PYTHONPATH={os.environ.get('PYTHONPATH', '')}\n"
        node.program(name, f"#!/bin/sh\n{text}exec {SCRIPTS / name}\n")
    (node.bin / "setpriv").unlink()
    lines = ["PrologFlags=Alloc", *(f"{key}={node.bin / name}" for key, name in zip(KEYS, NAMES, strict=True))]
    it = SlurmCluster(node.folder / "slurm", num_nodes=1, more="\n".join(lines))
    try:
        it.start()
        yield it
    finally:
        it.close()


@pytest.fixture
def plain_cluster(node: Node) -> Iterator[SlurmCluster]:
    real_agent(node)
    it = SlurmCluster(node.folder / "slurm", num_nodes=1, more="KillWait=30")
    try:
        it.start()
        yield it
    finally:
        it.close()


KEYS = ("Prolog", "Epilog", "TaskProlog")


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")
def test_slurm_starts_and_ends_the_agent_and_a_missing_one_drains_no_node(node: Node, cluster: SlurmCluster) -> None:
    said = node.folder / "said"
    script = f"#!/bin/sh\nsrun sh -c 'echo \"$ROLECALL_AGENT_DIR\" > {said}; sleep 600'\n"
    job = cluster.submit(script)
    dir_of_job = node.runs / f"job-{job}"
    pid = _agent_of(dir_of_job)
    eventually(lambda: said.exists() and said.read_text().strip(), "its task runs")
    assert said.read_text().strip() == str(dir_of_job)
    cluster.run("scancel", str(job))
    eventually(lambda: not dir_of_job.exists(), "the epilog has run")
    assert not Path(f"/proc/{pid}/exe").exists()

    node.agent.unlink()
    done = node.folder / "done"
    cluster.submit(f"#!/bin/sh\ntouch {done}\n")
    eventually(done.exists, "a job without an agent runs")
    eventually(lambda: cluster.run("sinfo", "--noheader", "--format=%T").split() == ["idle"], "the node is idle")


PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "slurm.md").read_text()


def job_script(folder: Path, port: int) -> str:
    """That of the how-to, for one node with two ranks, beside other agents of this machine."""
    (text,) = [b for b in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "#SBATCH" in b]
    config = folder / "agent.yaml"
    for old, new in {
        "--nodes=4 --ntasks-per-node=8 --gpus-per-node=8": "--nodes=1 --ntasks-per-node=2",
        "--ntasks-per-node=8 python": "--ntasks-per-node=2 python",
        "--host 0.0.0.0": f"--config {config} --port {port}",
        "&=http://&:9477": f"&=http://127.0.0.1:{port}",
        "/tmp/": f"{folder}/local-",
    }.items():
        assert old in text
        text = text.replace(old, new)
    return str(text)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_the_job_script_keeps_the_journal_of_its_node(
    node: Node, plain_cluster: SlurmCluster, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, submitted = plain_cluster, node.folder / "submitted"
    submitted.mkdir()
    monkeypatch.chdir(submitted)
    node.program("rolecall", f'#!/bin/sh\nexec {sys.executable} -m rolecall "$@"\n')
    node.program("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (submitted / "train.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path('ends').exists():\n    time.sleep(0.1)\nraise SystemExit(3)\n"
    )
    script = job_script(node.folder, _free_port())
    environment = {**os.environ, **cluster.environment, "PATH": f"{node.bin}:{os.environ['PATH']}"}
    job = cluster.submit(script, PATH=environment["PATH"])
    kept, local = submitted / f"rolecall-{job}", node.folder / f"local-rolecall-runs-{job}"
    journal = f"job-{job}/journal.db"
    eventually((local / journal).exists, "the watch has its journal on the node's own disk", seconds=300)
    (asked,) = [b for b in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if b.startswith("srun --overlap --jobid")]
    live = asked.replace("4711", str(job)).replace("/tmp/", f"{node.folder}/local-")
    assert "no incidents" in said_by(live, submitted, environment)
    assert not (kept / journal).exists()
    if end == "fails":
        (submitted / "ends").touch()
    else:
        cluster.run("scancel", str(job))
    eventually(lambda: (kept / journal).exists() and not local.exists(), "the journal is kept", seconds=300)
    if end == "fails":
        eventually(lambda: "ExitCode=3:0" in cluster.run("scontrol", "show", "job", str(job)), "its code is the job's")
    command = f"rolecall incidents --run job-{job} --runs {kept.name}"
    assert "no incidents" in said_by(command, submitted, environment)


def said_by(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done
    return done.stdout


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
