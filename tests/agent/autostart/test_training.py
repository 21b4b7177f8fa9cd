"""What torch's hooks tell of a training loop that reports nothing itself."""

import copy
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook

from rolecall.agent.autostart.training import (
    STEPS_WITHOUT_CALL,
    STEPS_WITHOUT_LEAD,
    Hook,
    TrainingWatch,
    is_rank,
    rank_in_group,
    role_of_actor,
)


class Report:
    """Records what is reported."""

    def __init__(self, started: bool = False) -> None:
        self.started = started
        self.phases: list[str] = []
        self.steps: list[int] = []
        self.units: list[tuple[float, float]] = []
        self.loading: list[float] = []
        self.passes: list[int] = []
        self.exchanges = 0
        self.identity: dict[str, int] = {}

    def start(self, *, source: str, role: str | None = None, **identity: int) -> None:
        assert source == "hooks" and role is None
        self.started, self.identity = True, identity

    def is_started(self) -> bool:
        return self.started

    def enter_phase(self, name: str) -> None:
        self.phases.append(name)

    def finish_step(
        self,
        n: int,
        phase: str,
        *,
        work_units: int = 1,
        busy_seconds: float = 0.0,
        exchange_seconds: float = 0.0,
        loading_seconds: float = 0.0,
    ) -> None:
        assert loading_seconds <= busy_seconds
        self.steps.append(n)
        self.units.append((busy_seconds, exchange_seconds))
        self.loading.append(loading_seconds)
        self.passes.append(work_units)
        self.enter_phase(phase)

    def begin_step(self, phase: str) -> None:
        self.enter_phase(phase)

    def count_collectives(self, issued: Callable[[], int]) -> None:
        assert issued() >= -1

    def exchange(self) -> None:
        self.exchanges += 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Job:
    """A loop whose loading, forward and backward pass take as long as given."""

    def __init__(self, report: Report) -> None:
        self.report, self.clock = report, Clock()
        self.watch = TrainingWatch(report, torch, self.clock)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seconds = 0.0
        self.model[1].register_forward_hook(lambda *_: self._advance())

    def _advance(self) -> None:
        self.clock.now += self.seconds

    def step(
        self, *, loading: float = 0.0, forward: float = 0.0, gradients: float = 0.0, backward: float = 0.0,
        accumulated: int = 1, optimizer: Any = None
    ) -> None:  # fmt: skip
        """`gradients`: seconds of a backward pass up to its last gradient; `backward`: after it."""

        def compute(_: torch.Tensor) -> None:
            self.clock.now += gradients

        self.clock.now += loading
        self.seconds = forward
        for _ in range(accumulated):
            out = self.model(torch.ones(1, 2))
            out.register_hook(compute)
            out.sum().backward()
            self.clock.now += backward
        (optimizer or self.optimizer).step()

    def evaluate(self, seconds: float) -> None:
        self.seconds = seconds
        with torch.no_grad():
            self.model(torch.ones(1, 2))


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(Report())
    handle = register_optimizer_step_post_hook(made.watch.after_optimizer)
    yield made
    handle.remove()
    assert not modules._global_forward_pre_hooks and not modules._global_forward_hooks, "the search has ended"


def warm(job: Job) -> Report:
    """Two steps: the rank is known, and its modules are found."""
    job.step()
    job.step()
    return job.report


def test_a_process_is_a_rank_with_its_first_step(job: Job) -> None:
    job.model(torch.ones(1, 2))
    assert not job.report.started
    report = warm(job)
    assert report.started and report.steps == [1, 2] and len(report.units) == 2
    assert set(report.phases) == {"wait"}, "no progress is due before the modules are known"


def test_a_step_is_judged_from_its_first_forward_pass(job: Job) -> None:
    report = warm(job)
    del report.phases[:]
    job.step(loading=0.5, forward=2.0, backward=3.0, accumulated=2)
    assert report.phases == ["step", "wait"]
    assert report.units[-1] == (pytest.approx(4.5), pytest.approx(6.0)), "own: loading and forward; the rest may wait"


def test_a_backward_pass_is_own_work_up_to_its_last_gradient(job: Job) -> None:
    report = warm(job)
    job.step(gradients=1.0)
    assert not report.exchanges, "in this step the order of the gradients is looked at"
    job.step(loading=0.5, forward=2.0, gradients=1.0, backward=3.0, accumulated=2)
    assert report.exchanges == 2 and report.units[-1] == (pytest.approx(6.5), pytest.approx(6.0))
    assert report.loading[-1] == pytest.approx(0.5) and report.passes[-1] == 2
    hooked = [len(p._post_accumulate_grad_hooks or {}) for p in job.model.parameters()]  # type: ignore[attr-defined]
    assert sum(hooked) == 1
    job.watch.stand_down()
    assert not any(p._post_accumulate_grad_hooks for p in job.model.parameters())  # type: ignore[attr-defined]


def test_the_gradients_of_sharded_parameters_are_not_hooked() -> None:
    class Shard(torch.nn.Parameter):
        pass

    job = Job(Report())
    job.model[0].weight = Shard(torch.ones(2, 2))
    handle = register_optimizer_step_post_hook(job.watch.after_optimizer)
    for _ in range(4):
        job.step(forward=2.0, gradients=1.0)
    handle.remove()
    assert not job.report.exchanges and job.report.units[-1] == (pytest.approx(2.0), pytest.approx(1.0))
    assert not any(p._post_accumulate_grad_hooks for p in job.model.parameters())  # type: ignore[attr-defined]


def test_evaluation_is_no_work_of_a_step(job: Job) -> None:
    report = warm(job)
    del report.phases[:]
    job.evaluate(40.0)
    assert report.phases == ["wait"], "entered again: it is not idle"
    job.step(loading=1.0, forward=2.0, backward=1.0)
    busy, _ = report.units[-1]
    assert busy == pytest.approx(2.0), "how long it loaded cannot be told from how long it evaluated"


def test_of_several_optimizers_one_leads(job: Job) -> None:
    report = warm(job)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(4):
        job.step()
        job.step(optimizer=other)
    assert report.steps[-1] == 6


def test_microbatches_without_a_step_are_no_hang_of_it(job: Job) -> None:
    """The last ones of an epoch, with an evaluation or another optimizer's step after them."""
    report = warm(job)
    del report.phases[:]
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    job.step(optimizer=other)
    assert report.phases == ["step", "wait"]
    job.model.eval()
    job.evaluate(40.0)
    assert report.phases == ["step", "wait", "wait"], "entered again: it is not idle"
    job.model.train()
    job.step()
    assert report.phases == ["step", "wait", "wait", "step", "wait"] and report.steps[-1] == 3
    job.model(torch.ones(1, 2)).sum().backward()
    job.model.eval()
    job.evaluate(40.0)
    assert report.phases[-2:] == ["step", "wait"]
    job.model.train()


def test_a_pass_without_gradients_in_a_step_is_part_of_it(job: Job) -> None:
    """As of old log-probabilities."""
    report = warm(job)
    del report.phases[:]
    job.model(torch.ones(1, 2)).sum().backward()
    job.evaluate(1.0)
    job.optimizer.step()
    assert report.phases == ["step", "wait"]


def test_of_many_optimizers_one_leads(job: Job) -> None:
    report = warm(job)
    others = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(STEPS_WITHOUT_LEAD + 2)]
    for _ in range(3):
        job.step()
        for other in others:
            other.step()
    assert report.steps[-1] == 2 + 3


def test_another_leads_at_once_when_the_first_is_gone(job: Job) -> None:
    report = warm(job)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    gc.collect()
    job.step()
    job.step()
    assert report.steps[-1] == 2 + 2


def test_another_leads_when_the_first_has_ended(job: Job) -> None:
    report = warm(job)
    other = torch.optim.SGD(job.model.parameters(), lr=0.1)
    for _ in range(STEPS_WITHOUT_LEAD + 3):
        job.step(optimizer=other)
    assert report.steps[-1] == 2 + 3


def test_steps_of_further_parameter_groups_are_no_units(job: Job) -> None:
    report = warm(job)
    for _ in range(3):
        job.step()
        job.optimizer.step()
        job.optimizer.step()
    assert report.steps[-1] == 2 + 3


def test_steps_count_again_when_the_hooked_modules_are_not_called_any_more(job: Job) -> None:
    report = warm(job)
    for _ in range(STEPS_WITHOUT_CALL + 1 + 3):
        job.optimizer.step()  # as with a CUDA graph, which replays the forward pass
    assert report.steps[-1] == 2 + 3
    for _ in range(2):  # the next part trains another module
        job.model[0](torch.ones(1, 2)).sum().backward()
        job.optimizer.step()
    assert report.steps[-1] == 2 + 3 + 2 and report.phases[-2:] == ["step", "wait"]
    assert job.model[0]._forward_pre_hooks and not job.model._forward_pre_hooks


def test_the_search_goes_on_until_a_module_is_found(job: Job) -> None:
    job.step()
    job.optimizer.step()
    job.step()
    assert "step" not in job.report.phases
    job.step()
    assert job.report.phases[-2:] == ["step", "wait"]


def test_a_module_in_evaluation_mode_is_no_work_of_a_step(job: Job) -> None:
    report = warm(job)
    del report.phases[:]
    job.model.eval()
    job.step(loading=1.0, forward=2.0)
    assert set(report.phases) == {"wait"} and report.steps[-1] == 3
    assert report.units[-1] == (0.0, 0.0), "nothing is known about its time"


def test_the_modules_of_another_leading_optimizer_are_searched_again(job: Job) -> None:
    report = warm(job)
    model = torch.nn.Linear(2, 1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS_WITHOUT_LEAD + 3):
        model(torch.ones(1, 2)).sum().backward()
        other.step()
    assert report.steps[-1] == 2 + 3 and report.phases[-2:] == ["step", "wait"]
    assert not job.model._forward_pre_hooks, "the first model is left"


def test_a_model_that_is_compiled_later_still_shows_its_steps(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    report = warm(job)
    dynamo = SimpleNamespace(counters={"frames": {"total": 1}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)  # type: ignore[arg-type]
    del report.phases[:]
    job.optimizer.step()
    job.step()
    assert report.steps[-1] == 4
    assert set(report.phases) == {"wait"}, "its optimizer may be compiled, too, and end no step"


def test_nothing_happens_while_torch_compile_traces(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    report = warm(job)
    del report.phases[:]
    monkeypatch.setattr(job.watch._guard, "is_compiling", lambda: True)
    job.model(torch.ones(1, 2))
    job.watch.after_optimizer(job.optimizer, (), {})
    assert report.phases == [] and report.steps[-1] == 2


def test_a_hooked_model_is_copied_and_saved_without_rolecall(job: Job, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [type(h) for h in (*model._forward_pre_hooks.values(), *model._forward_hooks.values())] == [Hook, Hook]
    expected = model.eval()(torch.ones(1, 2))
    del job.report.phases[:]

    copied = copy.deepcopy(copy.deepcopy(model))
    assert torch.equal(copied(torch.ones(1, 2)), expected)
    assert job.report.phases == [], "a copy reports nothing"
    assert not any(p._post_accumulate_grad_hooks for p in copied.parameters())  # type: ignore[attr-defined]

    torch.save(model, tmp_path / "model.pt")
    script = """
import sys
sys.modules["rolecall"] = None  # an import of it fails
import torch
model = torch.load("model.pt", weights_only=False)
torch.save(model, "again.pt")
print(torch.load("again.pt", weights_only=False)(torch.ones(1, 2)).item())
"""
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert float(done.stdout) == pytest.approx(model(torch.ones(1, 2)).item()), done.stderr


def test_a_job_that_reports_itself_is_left_to_it() -> None:
    job = Job(Report(started=True))
    job.watch.after_optimizer(job.optimizer, (), {})
    job.watch.after_optimizer(job.optimizer, (), {})
    assert not job.report.steps and not job.report.phases


def test_other_threads_do_not_count(job: Job) -> None:
    report = warm(job)
    del report.phases[:]
    thread = threading.Thread(target=lambda: job.model(torch.ones(1, 2)))
    thread.start()
    thread.join(30)
    assert report.phases == []


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 3 of 4, by the default process group alone."""
    world = SimpleNamespace(rank=lambda: 3, size=lambda: 4, _get_sequence_number_for_group=lambda: 0)
    distributed = SimpleNamespace(GroupMember=SimpleNamespace(WORLD=world))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", distributed)
    for name in ("RANK", "ROLECALL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("group")
def test_the_rank_is_that_of_the_process_group(job: Job) -> None:
    assert warm(job).identity == {"rank": 3, "world_size": 4}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["RANK", "ROLECALL_RANK", "SLURM_PROCID"])
def test_a_rank_of_the_environment_counts(name: str) -> None:
    assert rank_in_group({name: "1"}) == {}
    assert rank_in_group({"LOCAL_RANK": "1", "NODE_RANK": "0"}) == {"rank": 3, "world_size": 4}


@pytest.mark.usefixtures("group")
def test_ranks_that_a_task_spawns_do_not_share_its_rank() -> None:
    """They inherit the variables of the one process that was launched."""
    group = {"rank": 3, "world_size": 4}
    assert rank_in_group({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == group
    assert rank_in_group({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "8"}) == group
    assert rank_in_group({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == {}
    assert rank_in_group({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "ROLECALL_RANK": "7"}) == {}


def test_without_a_group_nothing_is_known_of_the_rank(job: Job) -> None:
    report = warm(job)
    assert report.started and report.identity == {}


def test_nothing_is_raised_into_the_job() -> None:
    class Broken(Report):
        def start(self, *, source: str, role: str | None = None, **identity: int) -> None:
            raise OSError("no space")

    job = Job(Broken())
    job.watch.after_optimizer(job.optimizer, (), {})
    job.watch.after_optimizer(job.optimizer, (), {})
    assert not job.report.steps


def test_nothing_is_raised_into_a_forward_pass(job: Job) -> None:
    report = warm(job)

    def fail(name: str) -> None:
        raise OSError(name)

    report.enter_phase = fail  # type: ignore[method-assign]
    job.step()
    job.step()
    assert report.steps == [1, 2] and not job.model._forward_pre_hooks


def test_nothing_is_raised_into_the_forward_pass_of_a_search() -> None:
    def fail() -> bool:
        raise RuntimeError

    job = Job(Report())
    job.watch = TrainingWatch(job.report, SimpleNamespace(nn=torch.nn, is_grad_enabled=fail), job.clock)
    job.watch.after_optimizer(job.optimizer, (), {})
    job.model(torch.ones(1, 2))
    job.watch.after_optimizer(job.optimizer, (), {})
    assert not modules._global_forward_pre_hooks and not modules._global_forward_hooks
    assert job.report.steps == [1]


def test_an_actor_of_ray_is_a_rank_if_it_is_told_which() -> None:
    assert is_rank({}) and is_rank({"RANK": "3"})
    assert not is_rank({"RAY_JOB_ID": "01000000"})
    assert is_rank({"RAY_JOB_ID": "01000000", "RANK": "0"})


def test_an_actor_of_ray_may_be_told_after_torch_is_imported(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    monkeypatch.setenv("RANK", "1")  # torch has its hook already
    assert warm(job).steps == [1, 2]


def test_an_actor_of_ray_that_is_never_told_is_none(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    for name in ("RANK", "ROLECALL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert not warm(job).started


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::CriticModelActor.fit", "critic"),
        ("ray::MegatronValueWorker.train", "critic"),
        ("ray::PolicyModelActor.fit", None),
        ("python train_critic.py", None),
    ],
)
def test_the_actor_of_a_critic_is_no_rank_of_the_trainer(title: str, role: str | None) -> None:
    assert role_of_actor({"RAY_JOB_ID": "01000000", "RANK": "0"}, title) == role
    assert role_of_actor({"RANK": "0"}, title) is None
    assert role_of_actor({"RAY_JOB_ID": "01000000", "ROLECALL_ROLE": "value"}, title) is None
