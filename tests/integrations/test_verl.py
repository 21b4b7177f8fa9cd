"""The plugin of verl: in a stand-in with verl's layout, and by its parts. Real verl: `real/README.md`."""

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rolecall.agent.autostart.environment import ENABLED
from rolecall.integrations import verl_processes
from rolecall.integrations.training import Training
from rolecall.integrations.verl_processes import Process, Requests, role_of
from tests.integrations.recorded import Recorded

ROOT = Path(__file__).parents[2]

LAYOUT = {
    "verl/__init__.py": "import importlib; importlib.import_module('rolecall.integrations.verl')",
    "verl/single_controller/__init__.py": "",
    "verl/single_controller/base/__init__.py": "",
    "verl/single_controller/base/decorator.py": """
def register(mode=None):
    def decorator(function):
        function.attrs = mode
        return function
    return decorator
""",
    "verl/workers.py": """
from verl.single_controller.base.decorator import register

class Worker:
    rank, world_size, role = 1, 2, "actor_rollout"

    @register(mode=1)
    def init_model(self):
        pass

    @register(mode=1)
    def compute_log_prob(self, data):
        return shown()

    @register(mode=1)
    def update_actor(self, data):
        return self.train_batch(data)

    @register(mode=1)
    def train_batch(self, data):
        return shown()

    @register(mode=1)
    async def update_weights(self):
        return shown()

    @register(mode=1)
    def query(self):
        return shown()

def shown():
    import sys
    reporter = sys.modules.get("rolecall.agent.reporter.reporter")
    if reporter is None:
        return None
    page = reporter._page
    return page.phase, page.q[reporter.at.W_STEP], page.q[reporter.at.W_PROGRESS]
""",
    "job.py": """
import asyncio, json
import verl
from verl.workers import Worker, shown
worker = Worker()
worker.init_model()
found = [worker.compute_log_prob(1), worker.update_actor(1), asyncio.run(worker.update_weights()), worker.query(), shown()]
print(json.dumps([found, Worker.update_actor.attrs]))
""",
}


def run_job(folder: Path, **environ: str) -> Any:
    for name, text in LAYOUT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": f"{folder}:{ROOT}", **environ}
    done = subprocess.run(
        [sys.executable, str(folder / "job.py")], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_calls_of_a_worker_are_units_of_its_steps(tmp_path: Path) -> None:
    found, attrs = run_job(tmp_path, **{ENABLED: "1"}, RANK="1", WORLD_SIZE="2")
    assert found == [["step", 1, 0], ["step", 1, 1], ["update", 2, 2], ["wait", 2, 3], ["wait", 2, 3]]
    assert attrs == 1, "what verl marks stays marked"


def test_without_the_variable_nothing_is_changed(tmp_path: Path) -> None:
    found, attrs = run_job(tmp_path, RANK="1", WORLD_SIZE="2")
    assert found == [None] * 5 and attrs == 1, "not even the reporter is imported"
    assert run_job(tmp_path, **{ENABLED: "0"}) == [[None] * 5, 1]


def test_the_package_declares_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"rolecall": "rolecall.integrations.verl"}


def worker(role: str = "actor_rollout_ref", rank: int = 0, name: str = "ActorRolloutRefWorker", model: str = "") -> Any:
    made = type(name, (), {})()
    made.rank, made.world_size, made.config = rank, 2, SimpleNamespace(model_type=model)
    if role:
        made.role = role
    return made


@pytest.mark.parametrize(
    ("of", "role"),
    [
        (worker("actor_rollout_ref"), "trainer"),
        (worker("actor"), "trainer"),
        (worker("ref"), "reference"),
        (worker("rollout"), "rollout"),
        (worker("", name="TrainingWorker", model="language_model"), "trainer"),
        (worker("", name="TrainingWorker", model="value_model"), "critic"),
        (worker("", name="CriticWorker"), "critic"),
        (worker("", name="RewardModelWorker"), "reward"),
    ],
)
def test_roles(of: Any, role: str) -> None:
    assert role_of(of) == role


def process(report: Recorded, **environ: str) -> Process:
    return Process(Training(report), environ)


def done(it: Process, of: Any, *methods: str, args: tuple[Any, ...] = ()) -> None:
    for method in methods:
        with it.call(of, method, args):
            pass


def test_a_process_with_several_workers_is_named_by_the_trainer() -> None:
    report = Recorded()
    it = process(report)
    critic, actor = worker("", name="TrainingWorker", model="value_model"), worker(rank=1)
    done(it, critic, "reset")
    done(it, actor, "init_model")
    done(it, critic, "train_mini_batch")
    started = report.of("start")
    assert [one["replica"] for one in started] == ["critic/0", "trainer/0"] and started[-1]["rank"] == 1


def test_a_process_that_the_environment_names_keeps_its_name() -> None:
    report = Recorded()
    done(process(report, ROLECALL_REPLICA="trainer/4"), worker(rank=1), "init_model")
    assert report.of("start") == [{"rank": 1, "world_size": 2}]


def test_steps_go_on_after_the_checkpoint() -> None:
    report = Recorded()
    it = process(report)
    done(it, worker(), "load_checkpoint", args=("/ckpt/global_step_40/actor", None))
    done(it, worker(), "compute_log_prob")
    assert report.of("step") == [41]


def test_actor_and_critic_of_one_process_make_one_step() -> None:
    report = Recorded()
    it = process(report)
    critic, actor = worker("", name="TrainingWorker", model="value_model"), worker()
    for _ in range(3):
        done(it, critic, "train_mini_batch")
        done(it, actor, "update_actor")
    assert report.of("step")[::2] == [1, 2, 3]


def test_an_exception_of_a_worker_is_reported_and_passes() -> None:
    report = Recorded()
    error = ValueError("bad batch")
    with pytest.raises(ValueError), process(report).call(worker(), "update_actor", ()):
        raise error
    assert report.of("exception") == [error] and report.phases[-1] == "wait"


def test_what_receives_weights_for_an_engine_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Recorded()
    monkeypatch.setattr(verl_processes, "_process", process(report))
    for name in ("CheckpointEngineWorker", "ActorRolloutRefWorker"):
        before = len(report.calls)
        with verl_processes.call(worker("", name=name), "update_weights", ()):
            pass
        assert (len(report.calls) > before) == (name == "ActorRolloutRefWorker")


def test_a_worker_that_is_not_as_expected_goes_on() -> None:
    done(process(Recorded()), object(), "update_actor")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """In place of the reporter of this process."""
    report = Recorded()
    monkeypatch.setattr(verl_processes, "reporter", report)
    return report


def test_a_reward_worker_scores_while_it_has_requests(page: Recorded) -> None:
    rewards = Requests(process(page), "score")
    first, second = rewards.one("reward", 3, 0), rewards.one("reward", 3, 0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert page.phases[-1] == "score"
    second.__exit__(None, None, None)
    assert page.of("start") == [{"replica": "reward/3", "rank": 0}]
    assert page.phases == ["wait", "score", "wait"] and len(page.of("progress")) == 2
    assert page.of("update")[-1] == {"requests_active": 0}


def test_the_server_of_an_engine_is_a_rollout(page: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_processes, "_requests", Requests(process(page), "wait"))
    module = ModuleType("servers")
    exec(  # noqa: S102 our own text
        "class Server:\n"
        "    replica_rank, node_rank = 2, 1\n"
        "    async def generate(self, prompt):\n"
        "        return prompt + '!'\n"
        "class Other:\n"
        "    def generate(self): return 1\n",
        vars(module),
    )
    for found in (module.Server, module.Other):
        found.__module__ = "servers"
    other = module.Other.generate
    verl_processes._wrap_servers(module)
    assert asyncio.run(module.Server().generate("a")) == "a!"
    assert module.Other.generate is other
    assert page.of("start") == [{"replica": "rollout/2", "rank": 1}]


def test_the_controller_tells_step_reward_and_health() -> None:
    report = Recorded()
    it = process(report)
    metrics = {"training/global_step": 7, "critic/rewards/mean": 0.5, "actor/entropy": 0.25, "response_length/mean": 9}
    verl_processes._logged(it, metrics, 7)
    assert report.of("start") == [{"replica": "controller/0", "rank": 0}]
    assert report.of("step") == [7] and report.phases[-1] == "wait"
    assert report.of("update") == [{"reward": 0.5}]
    assert report.of("health") == [{"entropy": 0.25, "response_length": 9.0}]


def test_metrics_of_a_validation_are_no_step() -> None:
    report = Recorded()
    verl_processes._logged(process(report), {"val-core/gsm8k/acc": 0.5}, 7)
    assert report.calls == []


def test_a_rank_that_logs_stays_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Recorded()
    it = process(report)
    done(it, worker("", name="TrainingWorker"), "train_batch")
    verl_processes._logged(it, {"training/global_step": 1, "actor/loss": 0.5}, 1)
    assert len(report.of("start")) == 1 and report.of("step") == [1]
    assert report.of("update") == [{"loss": 0.5}]


@pytest.mark.parametrize("rank", [None, "first", object()])
def test_a_server_without_a_number_serves_all_the_same(
    page: Recorded, monkeypatch: pytest.MonkeyPatch, rank: object
) -> None:
    monkeypatch.setattr(verl_processes, "_requests", Requests(process(page), "wait"))

    class Server:
        replica_rank = rank

        async def generate(self, prompt: str) -> str:
            return prompt + "!"

    module = ModuleType("servers")
    Server.__module__ = "servers"
    module.Server = Server  # type: ignore[attr-defined]
    verl_processes._wrap_servers(module)
    assert asyncio.run(Server().generate("a")) == "a!"
    assert page.of("start") == [{"replica": "rollout/0", "rank": 0}]


def test_metrics_may_be_logged_by_name_and_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, Any]] = []
    monkeypatch.setattr(verl_processes, "logged", lambda data, step: told.append((data, step)))

    class Tracking:
        def log(self, data: object, step: int = 0, backend: object = None) -> tuple[object, int, object]:
            return data, step, backend

    module = ModuleType("tracking")
    module.Tracking = Tracking  # type: ignore[attr-defined]
    verl_processes._wrap_tracking(module)
    it = Tracking()
    assert [it.log({}, 7, "x"), it.log(data={}, step=8), it.log({})] == [({}, 7, "x"), ({}, 8, None), ({}, 0, None)]
    assert told == [({}, 7), ({}, 8), ({}, None)]


def test_a_reward_loop_that_is_no_coroutine_is_left_alone() -> None:
    class RewardLoopWorker:
        def compute_score(self, data: int) -> int:
            return data

    module = ModuleType("loop")
    module.RewardLoopWorker = RewardLoopWorker  # type: ignore[attr-defined]
    with pytest.raises(TypeError):  # logged by who calls it
        verl_processes._wrap_reward_loop(module)
    assert RewardLoopWorker().compute_score(3) == 3


def test_a_plugin_that_cannot_be_loaded_does_not_stop_verl(tmp_path: Path) -> None:
    """Another version of rolecall, or a part of it, may be installed there."""
    code = (
        "import sys; sys.modules['rolecall.integrations.verl_processes'] = None\n"
        "import rolecall.integrations.verl; print('goes on')"
    )
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), ENABLED: "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "goes on\n" and "rolecall sees nothing of this process" in done.stderr
