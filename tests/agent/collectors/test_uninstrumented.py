"""Jobs that know nothing of rolecall: who is found, what is reported about them, and what `watch` makes of it.

The jobs are stand-ins: processes of our own with titles, arguments, environments and children like theirs. A folder of
links replaces `/proc`, so that no other processes are found.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.agent.collectors.process.discovery import (
    REPLICA_MAX,
    Discovery,
    Match,
    ProcessFacts,
    job_number,
    node_index,
    parse_discovery,
)
from rolecall.agent.collectors.process.discovery import parse_labels as labels_of
from rolecall.agent.collectors.process.exits import ExitStatus, ExitWatch, requested_exit
from rolecall.agent.collectors.process.uninstrumented import ROTATION, YOUNG_SECONDS, UninstrumentedJobCollector
from rolecall.agent.events import EventLog
from rolecall.agent.node import Agent, AgentSettings
from rolecall.agent.registry import Registry
from rolecall.agent.samples import sample_of
from rolecall.core.clock import FakeClock
from rolecall.core.errors import ConfigError
from rolecall.core.http import HttpFailed
from rolecall.core.metrics.catalogue import process_values
from rolecall.core.telemetry import AgentEvent, ProcessSample
from rolecall.recovery.operators import queries
from rolecall.watch.agents import entries_of, listed, named_agents, observing_run
from rolecall.watch.run import watch_run
from tests.agent.processes import NODE, TOKEN
from tests.support import PATIENCE_SECONDS, eventually

SLEEP = "/bin/sleep"
TORCH = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
WAITS = "import sys; sys.stdin.read()"


class Job:
    """Stand-ins of one node, and the folder in which a collector sees them."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        proc.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def titled(self, title: str, **environ: str) -> subprocess.Popen[str]:
        """Like Ray's workers: the title in place of the arguments."""
        return self._started(subprocess.Popen([title, "1000"], executable=SLEEP, env=environ, text=True))

    def python(
        self, *arguments: str, code: str = WAITS, log: Path = Path(os.devnull), **environ: str
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", code, *arguments]
        pipe = subprocess.PIPE
        with log.open("w") as stderr:
            return self._started(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=environ, text=True)
            )

    def _started(self, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        self.processes.append(process)
        # Popen returns in the middle of exec: command line and environment come a moment later.
        eventually(Path(f"/proc/{process.pid}/cmdline").read_bytes, "it is what it was started as")
        self.see(process.pid)
        return process

    def see(self, pid: int) -> None:
        (self.proc / str(pid)).symlink_to(f"/proc/{pid}")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(PATIENCE_SECONDS)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


class World:
    """A registry and a collector over the stand-ins."""

    def __init__(self, path: Path, job: Job, discovery: Discovery | None = None) -> None:
        self.job, self.clock, self.open = job, FakeClock(), True
        (path / "pages").mkdir(exist_ok=True)
        self.events = EventLog(path / "events.jsonl", NODE, self.clock)
        self.exits = ExitWatch()
        self.exits.start()
        self.registry = Registry(
            node=NODE, data_dir=path, token=TOKEN, events=self.events, exits=self.exits, clock=self.clock
        )
        self.jobs = UninstrumentedJobCollector(self.registry, NODE, discovery or parse_discovery({}), proc=job.proc)

    def poll(self) -> None:
        self.clock.advance(1.0)
        self.jobs.read(self.clock.monotonic())

    def found(self) -> dict[int, tuple[str, int]]:
        """PID -> replica and rank of the living."""
        return {r.process.pid: (r.replica, r.rank) for r in self.registry.registrations()}

    def reported(self, kind: str = "") -> list[AgentEvent]:
        return [e for e in self.events.after(0).events if kind in ("", e.kind)]

    def close(self) -> None:
        self.open = False
        self.exits.stop()
        self.events.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    it = Job(tmp_path / "proc")
    yield it
    it.close()


@pytest.fixture
def world(tmp_path: Path, job: Job) -> Iterator[World]:
    it = World(tmp_path, job)
    yield it
    if it.open:
        it.close()


# --- rules

JOBS = {
    "verl trainer": ("ray::WorkerDict.actor_rollout_generate_sequences", {"RANK": "5"}, ("trainer", 0, 5)),
    "verl trainer, its environment overwritten": ("ray::WorkerDict.update_actor", None, ("trainer", None, 0)),
    "verl critic": ("ray::CriticWorker.update_critic", {"RANK": "1"}, ("critic", 0, 1)),
    "verl rollout": ("ray::vLLMHttpServer.generate", {}, ("rollout", None, 0)),
    "verl controller": ("ray::TaskRunner.run", {}, ("controller", None, 0)),
    "verl controller since 0.9": ("ray::TaskRunnerV1.run", {}, ("controller", None, 0)),
    "verl rollouter": ("ray::FullyAsyncRollouter.fit", {}, ("controller", None, 0)),
    "verl worker of several roles": ("ray::FusedWorker_actor_critic.run", {"RANK": "1"}, ("trainer", 0, 1)),
    "slime trainer": ("ray::MegatronTrainRayActor.train", None, ("trainer", None, 0)),
    "slime rollout": ("ray::SGLangEngine.update_weights", None, ("rollout", None, 0)),
    "slime manager": ("ray::RolloutManager.generate", None, ("controller", None, 0)),
    "openrlhf trainer": ("ray::PolicyModelActor.fit", None, ("trainer", None, 0)),
    "openrlhf critic": ("ray::CriticModelActor.forward", None, ("critic", None, 0)),
    "openrlhf reference": ("ray::ReferenceModelActor.forward", None, ("reference", None, 0)),
    "openrlhf reward": ("ray::RewardModelActor.forward", None, ("reward", None, 0)),
    "openrlhf rollout": ("ray::RolloutRayActor.generate", None, ("rollout", None, 0)),
    "openrlhf rollout before 0.11": ("ray::LLMRayActor.generate", None, ("rollout", None, 0)),
    "openrlhf controller": ("ray::PPOTrainer.fit", None, ("controller", None, 0)),
    "nemo-rl trainer": ("ray::DTensorPolicyWorkerV2.train", {"RANK": "5"}, ("trainer", 0, 5)),
    "nemo-rl trainer with its rank": ("ray::MegatronPolicyWorker[rank=3].train", None, ("trainer", 0, 3)),
    "nemo-rl critic": ("ray::DTensorValueWorkerV2.train", {"RANK": "1"}, ("critic", 0, 1)),
    "nemo-rl rollout": ("ray::VllmAsyncGenerationWorker.generate_async", {**TORCH}, ("rollout", None, 0)),
    "nemo-rl collector": ("ray::AsyncTrajectoryCollector.start_collection", None, ("controller", None, 0)),
    "torchrun": ("/usr/bin/python3 -u train.py", TORCH, ("trainer", 0, 3)),
    "srun": ("python train.py", {"SLURM_PROCID": "7", "SLURM_STEP_ID": "0"}, ("trainer", 0, 7)),
    "an idle worker of Ray": ("ray::IDLE", {"RANK": "5"}, None),
    "a data loader": ("python -c from multiprocessing.spawn import spawn_main", TORCH, None),
    "torchrun itself": ("python -m torch.distributed.run train.py", TORCH, None),
    "python without a rank": ("python -m http.server", {"RANK": "3"}, None),
    "a shell of the job": ("bash -c ./train.sh", TORCH, None),
    "a rank that is no number": ("python train.py", {**TORCH, "RANK": "three"}, None),
}


@pytest.mark.parametrize(("command", "environ", "expected"), JOBS.values(), ids=JOBS)
def test_default_rules_match_four_kinds_of_jobs(
    command: str, environ: Mapping[str, str] | None, expected: tuple[str, int | None, int] | None
) -> None:
    arguments = (command,) if command.startswith("ray::") else tuple(command.split())
    found = parse_discovery({}).find(ProcessFacts(arguments=arguments, environ=environ))
    assert (found and (found.role, found.replica, found.rank)) == expected


SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711"}
LAUNCHERS = (
    "/opt/conda/bin/python3.11 /opt/conda/bin/torchrun --nproc-per-node 8 --rdzv-backend c10d train.py",
    "/usr/bin/python3 -u -W ignore /usr/local/bin/torchrun -m recipes.train",
    "/opt/conda/bin/python3.11 /opt/conda/bin/accelerate launch --num_processes 8 train.py",
    "/opt/conda/bin/python3.11 /opt/conda/bin/accelerate-launch train.py",
    "python -m accelerate.commands.launch --num_processes 8 train.py",
    "/usr/bin/python3 /usr/local/bin/deepspeed --num_gpus 8 train.py --deepspeed ds.json",
    "/usr/bin/python3 -u -m deepspeed.launcher.launch --world_info=eyJ9 --node_rank=0 train.py",
    "/opt/venv/bin/python /opt/venv/bin/ft_launcher --nproc-per-node=8 train.py",
    "python -m torch.distributed.run --nproc-per-node 8 train.py",
    "/opt/conda/bin/python /opt/conda/bin/conda run -n rl python train.py",
    "bash -c source env.sh; python train.py",
    "/bin/sh /var/spool/slurmd/job4711/slurm_script python train.py",
    "timeout 9h python train.py",
    "uv run python train.py",
)
RANKS = (
    "python train.py",
    "/opt/conda/bin/python3.11 -u train.py --local_rank=0 --deepspeed ds.json",
    "python -X faulthandler -m recipes.train --launcher torchrun",
    "python accelerate_train.py launch",
    "python ./deepspeed.py",
    "python -u /work/torchrun_examples/train.py",
)


@pytest.mark.parametrize("environ", [TORCH, SRUN], ids=["of a PyTorchJob", "of srun"])
def test_launchers_are_no_ranks(environ: Mapping[str, str]) -> None:
    rules = parse_discovery({})
    for commands, is_rank in ((LAUNCHERS, False), (RANKS, True)):
        for command in commands:
            found = rules.find(ProcessFacts(arguments=tuple(command.split()), environ=environ))
            assert (found is not None) == is_rank, command


def test_a_shell_that_runs_a_rank_is_none_to_configured_rules() -> None:
    rules = parse_discovery({"rules": [{"name": "mine", "cmdline": r"train\.py", "role": "trainer"}]})
    assert rules.find(ProcessFacts(arguments=("/bin/bash", "-c", "nice python train.py"))) is None
    assert rules.find(ProcessFacts(arguments=("torchrun", "train.py"))) is None
    assert rules.find(ProcessFacts(arguments=("pypy3", "train.py"))) is not None


def test_rules_of_the_configuration_come_first_and_may_name_numbers_by_groups_and_labels() -> None:
    rule = {"name": "mine", "title": r"^ray::LLMRayActor_(?P<engine>\d+)", "role": "engine", "replica": "{engine}"}
    other = {"name": "pods", "labels": {"app": "^rl$"}, "role": "trainer", "replica": 0, "rank": "{RANK}|{index}"}
    rules = parse_discovery({"rules": [rule, other]})
    assert rules.find(ProcessFacts(arguments=("ray::LLMRayActor_7.generate",))) == Match(
        rule="mine", role="engine", replica=7, rank=0
    )
    assert rules.find(ProcessFacts(arguments=("anything",), labels={"app": "rl", "index": "2"})) == Match(
        rule="pods", role="trainer", replica=0, rank=2
    )


def test_all_problems_of_rules_are_reported_together() -> None:
    wrong = {"name": "A b", "role": "standby", "title": "(", "rank": "{RANK", "colour": "red", "job": "always"}
    with pytest.raises(ConfigError) as e:
        parse_discovery({"rules": [wrong, {"name": "x", "role": "x"}, 5], "node_index": -1, "by_job": 1, "spin": 1})
    for part in (
        "jobs.rules.spin: unknown key",
        "jobs.rules.node_index: expected",
        "rules.0.colour: unknown key",
        "rules.0.name: invalid name 'A b'",
        "rules.0.role: invalid role 'standby'",
        "rules.0.title: invalid regular expression",
        "rules.0.rank: expected a number",
        "rules.0.job: expected a text with {NAME}, got 'always'",
        "jobs.rules.by_job: expected true or false, got 1",
        "rules.1: needs title, cmdline or labels",
        "rules.2: expected a mapping",
    ):
        assert part in str(e.value)


def test_a_job_is_the_first_text_all_of_whose_names_are_known() -> None:
    rule = {"name": "mine", "title": "^t", "role": "trainer", "replica": 0, "job": "{RUN}/{PART}|of {SLURM_JOB_ID}"}
    rules = parse_discovery({"rules": [rule]})

    def job_of(**environ: str) -> str:
        found = rules.find(ProcessFacts(arguments=("t",), environ=environ))
        assert found is not None
        return found.job

    assert {"RUN", "PART", "SLURM_JOB_ID"} <= rules.names
    assert job_of(RUN="a", PART="b") == "a/b"
    assert job_of(RUN="a", SLURM_JOB_ID="7") == "of 7"
    assert job_of(RUN="a", PART="") == ""
    assert len(job_of(RUN="a" * 500, PART="b")) == 200
    assert 1 <= job_number("a") <= REPLICA_MAX and job_number("a") != job_number("b")


def test_labels_as_the_downward_api_writes_them() -> None:
    text = 'app="rl"\ntraining.kubeflow.org/replica-index="3"\nquoted="a \\"b\\""\nbroken\nalso=broken\n'
    assert labels_of(text) == {"app": "rl", "training.kubeflow.org/replica-index": "3", "quoted": 'a "b"'}


def test_nodes_are_distinguished_by_the_number_in_their_name() -> None:
    assert node_index("gpu-node-17") == 17
    assert node_index("ip-10-0-3-17") != node_index("ip-10-0-4-17")


# --- finding


def test_ranks_are_found_once_and_reported_with_the_rule(world: World, job: Job) -> None:
    trainer = job.titled("ray::WorkerDict.actor_rollout_update", RANK="5")
    first, second = (job.titled("ray::vLLMHttpServer.generate") for _ in range(2))
    rank = job.python("train.py", **TORCH)
    job.python("train.py")  # no rank of anything
    world.poll()
    world.poll()
    engines = sorted(world.found()[p.pid] for p in (first, second))
    assert engines == [("rollout/32", 0), ("rollout/33", 0)]  # node-1, 32 places a node
    assert world.found()[trainer.pid] == ("trainer/0", 5) and world.found()[rank.pid] == ("trainer/0", 3)
    reported = world.reported("registered")
    assert len(reported) == 4 and {e.incarnation for e in reported} == {0}
    assert {e.detail["found_by"] for e in reported} == {"verl-trainer", "verl-rollout", "torchrun"}


OTHER_JOB = {**TORCH, "MASTER_PORT": "29501"}


def test_two_jobs_of_one_node_are_distinguished(world: World, job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    mine = [job.python("train.py", **{**TORCH, "RANK": rank}) for rank in "01"]
    world.poll()
    theirs = [job.python("train.py", **{**OTHER_JOB, "RANK": rank}) for rank in "01"]
    world.poll()
    number = job_number("10.0.0.1:29501")
    assert [world.found()[p.pid] for p in mine] == [("trainer/0", 0), ("trainer/0", 1)]
    assert [world.found()[p.pid] for p in theirs] == [(f"trainer/{number}", 0), (f"trainer/{number}", 1)]
    assert [e.detail["job"] for e in world.reported("registered")] == ["10.0.0.1:29500"] * 2 + ["10.0.0.1:29501"] * 2
    assert caplog.text.count(f"job 10.0.0.1:29501: its ranks are watched as trainer/{number}, a number made of") == 1
    for process in mine:
        process.kill()
    eventually(lambda: len(world.reported("exited")) == 2, "the first is over")
    again = job.python("train.py", **{**TORCH, "RANK": "0", "MASTER_PORT": "41234"})  # as torchrun picks them
    world.poll()
    assert world.found()[again.pid] == ("trainer/0", 0)


def test_a_job_beside_one_with_the_reporter_is_distinguished_before_it_registers(world: World, job: Job) -> None:
    mine = job.python("train.py", **{**TORCH, "RANK": "0"})
    world.poll()
    [found] = world.registry.registrations()
    world.registry._tracked[found.process].registration = replace(found, found=False)
    theirs = [job.python("train.py", **{**OTHER_JOB, "RANK": rank}) for rank in "01"]
    world.poll()
    number = job_number("10.0.0.1:29501")
    assert world.found() == {mine.pid: ("trainer/0", 0)} | {
        p.pid: (f"trainer/{number}", rank) for rank, p in enumerate(theirs)
    }
    assert {e.detail["launcher_pid"] for e in world.reported("registered")} == {str(os.getpid())}


def test_where_jobs_share_nodes_each_has_the_same_number_everywhere(tmp_path: Path, job: Job) -> None:
    it = World(tmp_path, job, parse_discovery({"by_job": True}))
    try:
        rank, actor = job.python("train.py", **TORCH), job.titled("ray::WorkerDict.train", RANK="2")
        it.poll()
        # No job is known of the actor: the rule's own number is left to it.
        assert it.found() == {
            rank.pid: (f"trainer/{job_number('10.0.0.1:29500')}", 3),
            actor.pid: ("trainer/0", 2),
        }
    finally:
        it.close()


def test_a_restarted_agent_keeps_the_jobs_of_processes(world: World, job: Job, tmp_path: Path) -> None:
    job.python("train.py", **TORCH)
    world.poll()
    world.close()
    again = World(tmp_path, job)
    try:
        again.registry.adopt()
        other = job.python("train.py", **OTHER_JOB)
        again.poll()
        assert again.found()[other.pid][0] == f"trainer/{job_number('10.0.0.1:29501')}"
    finally:
        again.close()


def test_children_of_a_rank_are_its_helpers(world: World, job: Job) -> None:
    forks = "import os, sys\nif os.fork(): print(os.getpid(), flush=True)\nsys.stdin.read()"
    parent = job.python("train.py", code=forks, **TORCH)
    assert parent.stdout is not None and parent.stdout.readline()
    [child] = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    job.see(int(child))
    world.poll()
    assert set(world.found()) == {parent.pid}
    parent.kill()
    parent.wait(PATIENCE_SECONDS)
    (job.proc / str(parent.pid)).unlink()
    eventually(lambda: not world.found(), "its exit is noticed")
    world.poll()  # the orphan inherited RANK, and is no rank
    assert not world.found()


def test_a_worker_that_becomes_an_actor_is_found_and_its_variables_are_remembered(world: World, job: Job) -> None:
    becomes = "import os, sys\nsys.stdin.readline()\nos.execve('/bin/sleep', ['ray::WorkerDict.train', '1000'], {})"
    worker = job.python(code=becomes, RANK="6")
    script = job.proc / "default_worker.py"
    script.write_text(becomes)
    real = subprocess.Popen(
        [sys.executable, "-S", str(script)], stdin=subprocess.PIPE, text=True, env={"RANK": "4", "OTHER": "x"}
    )
    job._started(real)
    world.poll()
    assert not world.found()
    world.clock.advance(2 * YOUNG_SECONDS)
    for process in (worker, real):
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        cmdline = Path(f"/proc/{process.pid}/cmdline")
        eventually(lambda path=cmdline: path.read_bytes().startswith(b"ray::"), "it took its title")
    for _ in range(8):
        world.poll()
    assert world.found()[real.pid] == ("trainer/0", 4)  # from before it took its title
    assert world.found()[worker.pid] == ("trainer/32", 0)  # unknown after the restart


def test_processes_of_our_own_runs_are_left_to_their_reporters(world: World, job: Job) -> None:
    job.python("train.py", **TORCH, ROLECALL_RUN="/runs/1")
    world.poll()
    assert not world.found()


def test_an_unreadable_process_is_logged_once_and_an_ended_one_is_normal(
    world: World, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = job.proc / "77"
    stranger.mkdir()
    (stranger / "stat").write_text(f"77 (python) S 1 {'0 ' * 17}500 0 0")
    (stranger / "cmdline").write_bytes(b"python\0train.py\0")
    (stranger / "environ").mkdir()  # there, and cannot be read
    (job.proc / "78").mkdir()  # gone while it is read
    for pid, readable in ((79, ("stat",)), (80, ("stat", "cmdline"))):  # a moment later
        (job.proc / str(pid)).mkdir()
        for name in readable:
            content = (stranger / name).read_bytes().replace(b"77 (", f"{pid} (".encode())
            (job.proc / str(pid) / name).write_bytes(content)
    for _ in range(3):
        world.poll()
    assert not world.found()
    assert caplog.text.count("cannot be read: run the agent as their user or as root") == 1


# --- what is reported about them


def test_a_killed_rank_is_an_exit_with_role_replica_and_rank(world: World, job: Job, tmp_path: Path) -> None:
    rank = job.python("train.py", log=tmp_path / "stderr.log", **TORCH)
    world.poll()
    rank.send_signal(signal.SIGKILL)
    eventually(lambda: world.reported("exited"), "its exit is reported")
    [event] = world.reported("exited")
    assert (event.role, event.replica, event.rank) == ("trainer", "trainer/0", 3)
    assert event.detail["signal"] == "9" and "last_phase" not in event.detail
    assert event.detail["log_file"] == str(tmp_path / "stderr.log")
    assert not world.reported("finished")


@pytest.mark.parametrize("end", ["exits", "is asked to", "handles it"])
def test_an_end_that_was_wanted_is_no_fault(world: World, job: Job, end: str) -> None:
    handles = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); print(flush=True); "
    rank = job.python("train.py", code=handles * (end == "handles it") + WAITS, **TORCH)
    world.poll()
    assert rank.stdin is not None and rank.stdout is not None
    if end == "handles it":
        rank.stdout.readline()
    if end == "exits":
        rank.stdin.close()
    else:
        rank.terminate()
    eventually(lambda: world.reported("exited"), "its exit is reported")
    assert [str(e.kind) for e in world.reported()] == ["registered", "finished", "exited"]


def test_only_a_clean_end_was_wanted() -> None:
    assert requested_exit(ExitStatus(code=0)) and requested_exit(ExitStatus(signal=signal.SIGTERM))
    assert requested_exit(ExitStatus(code=143)) == "exited with code 143, as after SIGTERM"
    assert requested_exit(ExitStatus(code=130)) and requested_exit(ExitStatus(code=129))
    for status in (ExitStatus(code=128), ExitStatus(code=134), ExitStatus(code=137), ExitStatus(code=128 + 11)):
        assert not requested_exit(status)
    for status in (ExitStatus(), ExitStatus(code=1), ExitStatus(signal=signal.SIGKILL), ExitStatus(signal=6)):
        assert not requested_exit(status)


def test_a_successor_takes_the_place_of_the_dead(world: World, job: Job) -> None:
    first = job.titled("ray::vLLMHttpServer.generate")
    world.poll()
    first.kill()
    eventually(lambda: world.reported("exited"), "its exit is reported")
    second = job.titled("ray::vLLMHttpServer.generate")
    world.poll()
    assert world.found() == {second.pid: ("rollout/32", 0)}
    assert [t.registration.process.pid for t in world.registry.processes()] == [second.pid]  # the dead is not shown


def test_a_rank_whose_former_process_outlives_its_first_polls_is_found_in_the_end(world: World, job: Job) -> None:
    former, second = job.python("train.py", **TORCH), job.python("train.py", **TORCH)
    world.poll()
    world.clock.advance(2 * YOUNG_SECONDS)
    world.poll()
    (known,) = world.found()
    (rank,) = {former.pid, second.pid} - {known}
    os.kill(known, signal.SIGKILL)
    eventually(lambda: world.reported("exited"), "its exit is reported")
    for _ in range(ROTATION):
        world.poll()
    assert world.found() == {rank: ("trainer/0", 3)}


def test_without_a_page_there_is_no_progress(world: World, job: Job) -> None:
    rank = job.python("train.py", **TORCH)
    world.poll()
    [tracked] = world.registry.processes()
    sample = sample_of(tracked, 1.0, 2.0)
    assert isinstance(sample, ProcessSample)
    assert sample.phase == "" and sample.alive and sample.process.pid == rank.pid
    named = {v.metric.source for v in process_values(sample)}
    assert {"alive", "proc_state", "cpu_seconds"} <= named
    assert not named & {"progress", "phase", "step", "beats", "page_ok", "incarnation"}


def test_a_restarted_agent_keeps_the_discovered_processes(world: World, job: Job, tmp_path: Path) -> None:
    killed, lives = job.python("train.py", **TORCH), job.python("train.py", **{**TORCH, "RANK": "4"})
    world.poll()
    world.close()
    killed.kill()
    killed.wait(PATIENCE_SECONDS)
    again = World(tmp_path, job)
    try:
        again.registry.adopt()
        again.poll()
        assert again.found() == {lives.pid: ("trainer/0", 4)}
        assert [(e.replica, e.rank) for e in again.reported("exited")] == [("trainer/0", 3)]
        assert len(again.reported("registered")) == 2
    finally:
        again.close()


# --- to a diagnosis


def test_watch_reports_a_killed_and_a_stopped_rank(tmp_path: Path, job: Job) -> None:
    ranks = [job.python("train.py", **{**TORCH, "RANK": str(n)}) for n in range(3)]
    engine = job.titled("ray::SGLangEngine.generate")
    settings = AgentSettings(
        node=NODE,
        data_dir=tmp_path / "agent",
        token=TOKEN,
        collectors=lambda registry: [
            UninstrumentedJobCollector(registry, NODE, parse_discovery({}), interval_seconds=0.2, proc=job.proc)
        ],
    )
    agent = Agent(settings)
    serving = threading.Thread(target=agent.run)
    serving.start()
    stop = threading.Event()
    result: list[int] = []
    try:
        eventually(lambda: agent.registry.num_live() == 4, "all are found")
        eventually(lambda: (tmp_path / "agent" / "agent.json").exists(), "it serves")
        run = observing_run(tmp_path / "runs", "stand-in", named_agents(listed(agent.url)))
        watching = threading.Thread(target=lambda: result.append(watch_run(run, stop=stop)))
        watching.start()
        engine.send_signal(signal.SIGSTOP)
        ranks[1].kill()

        def reported() -> dict[str, str]:
            return {i["fault_class"]: i["because"] for i in queries.incidents(run)}

        eventually(lambda: {"crash", "hang"} <= set(reported()), "both are diagnosed")
        assert "trainer/0 rank 1 (node-1, pid" in reported()["crash"] and "on signal 9" in reported()["crash"]
        assert "rollout/32" in reported()["hang"] and "state T" in reported()["hang"]
        eventually(lambda: all(i["page"] for i in queries.incidents(run)), "the page is logged")
        assert "rolecall only watches this job" in queries.incidents(run)[0]["page_reason"]
        opened = {i["fault_class"]: i["to_do"] for i in queries.status(run)["open_incidents"]}
        assert "read the log of trainer/0 rank 1" in opened["crash"]
        assert f"kill -CONT {engine.pid}" in opened["hang"]
        engine.send_signal(signal.SIGCONT)
        eventually(lambda: [i["outcome"] for i in queries.incidents(run)].count("self_recovered") == 1, "it runs again")
        assert [i["fault_class"] for i in queries.status(run)["open_incidents"]] == ["crash"]
    finally:
        engine.send_signal(signal.SIGCONT)
        stop.set()
        agent.stop()
        serving.join(PATIENCE_SECONDS)
        if "watching" in locals():
            watching.join(PATIENCE_SECONDS)
    assert result == [1]


def test_agents_are_named_by_address_or_by_file(tmp_path: Path) -> None:
    path = tmp_path / "agents"
    path.write_text("http://a:1  # the first\n\nnode-9=http://b:2\n")
    assert entries_of(path) == ["http://a:1", "node-9=http://b:2"] == listed("http://a:1,node-9=http://b:2")
    assert named_agents(entries_of(path), query=lambda url: "node-a") == {
        "node-a": "http://a:1",
        "node-9": "http://b:2",
    }

    def silent(url: str) -> str:
        raise HttpFailed("connection refused", refused=True)

    with pytest.raises(ConfigError, match=r"http://a:1: no agent answers there .*NODE=http://a:1"):
        named_agents(["http://a:1"], query=silent)
    with pytest.raises(
        ConfigError, match=r"No such file or directory; if that is an agent, write http://127\.0\.0\.1:9477"
    ):
        entries_of(Path("127.0.0.1:9477"))
    with pytest.raises(ConfigError, match="both report node n"):
        named_agents(["http://a:1", "http://b:2"], query=lambda url: "n")
    for wrong in ("ftp://a:1", "http://a:1,node"):
        with pytest.raises(ConfigError):
            listed(wrong)
    with pytest.raises(ConfigError, match="No such file"):
        entries_of(tmp_path / "none")


def test_a_run_of_our_own_is_not_taken_for_an_observed_one(tmp_path: Path) -> None:
    run = observing_run(tmp_path, "watch-1", {"n": "http://a:1"})
    assert observing_run(tmp_path, "watch-1", {"n": "http://a:2"}).read()["agents"] == {"n": "http://a:2"}
    run.write({k: v for k, v in run.read().items() if k != "agents"})
    with pytest.raises(ConfigError, match="started itself"):
        observing_run(tmp_path, "watch-1", {})
