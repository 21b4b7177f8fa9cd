"""The callback under the real `Trainer` of transformers; TRL's part under a trainer with TRL's attributes."""

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rolecall.integrations.training import Training
from rolecall.integrations.transformers import RolecallCallback, Timed, trainer_of, wrapped
from tests.integrations.recorded import Clock, Recorded


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2) * (index % 3), "labels": torch.tensor(float(index % 2))}


def trainer(folder: Path, callback: RolecallCallback, kind: Any = None, **more: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )
    return (kind or transformers.Trainer)(model=Model(), args=arguments, train_dataset=Data(), callbacks=[callback])


def test_steps_of_a_trainer(tmp_path: Path) -> None:
    report = Recorded()
    trainer(tmp_path, RolecallCallback(Training(report, Clock()))).train()
    assert report.of("start") == [{}]
    assert report.of("step") == [1, 2, 3], "numbered as the trainer logs them"
    assert report.phases == ["wait", *["step", "wait"] * 3]
    assert len(report.of("progress")) == 3
    assert [sorted(values) for values in report.of("update")] == [["grad_norm", "loss"]] * 3
    assert report.of("health") == []


def test_gradient_accumulation_makes_a_step_longer(tmp_path: Path) -> None:
    report = Recorded()
    trainer(tmp_path, RolecallCallback(Training(report)), gradient_accumulation_steps=2).train()
    assert report.of("step") == [1, 2, 3] and len(report.of("progress")) == 3


class Scoring(transformers.Trainer):  # type: ignore[misc]
    """Has what TRL's trainers have: reward functions, and a method that generates."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.reward_funcs = [length, later, torch.nn.Linear(1, 1)]

    def _generate(self, prompts: list[str]) -> list[str]:
        return prompts

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        completions = self._generate(["a", "bc"])
        assert self.reward_funcs[0](completions=completions) == [1.0, 2.0]
        assert asyncio.run(self.reward_funcs[1](completions=completions)) == [0.0, 0.0]
        self.log({"reward": 1.5, "entropy": 0.25, "completions/mean_length": 7.0, "clip_ratio/low_mean": float("nan")})
        loss = super().training_step(model, inputs, num_items_in_batch)
        assert isinstance(loss, torch.Tensor)
        return loss


def length(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


async def later(completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [0.0 for _ in completions]


def test_generation_and_rewards_of_a_step(tmp_path: Path) -> None:
    report, clock = Recorded(), Clock()
    made = trainer(tmp_path, RolecallCallback(Training(report, clock)), Scoring)
    functions = made.reward_funcs
    made.train()
    one = ["step", "generate", "step", "score", "step", "score", "step", "wait"]
    assert report.phases == ["wait", *one * 3]
    assert {"reward": 1.5} in report.of("update")
    assert report.of("health")[0] == {"entropy": 0.25, "response_length": 7.0}
    assert all(busy == 0.0 for _, busy in report.of("progress")), "answers grow: no step is slow for that"
    assert made.reward_funcs is functions and made.reward_funcs[0] is length, "as before, after the training"
    assert "_generate" not in vars(made)


def test_a_trainer_is_trained_again(tmp_path: Path) -> None:
    report = Recorded()
    made = trainer(tmp_path, RolecallCallback(Training(report)), Scoring)
    made.train()
    made.train()
    assert made.reward_funcs[0] is length and report.of("step") == [1, 2, 3] * 2


def test_an_exception_of_a_reward_function_passes(tmp_path: Path) -> None:
    def broken(completions: list[str]) -> list[float]:
        raise ValueError("bad sample")

    made = trainer(tmp_path, RolecallCallback(Training(Recorded())), Scoring)
    made.reward_funcs[0] = broken
    with pytest.raises(ValueError, match="bad sample"):
        made.train()


def test_a_callback_is_copied_without_its_state() -> None:
    callback = RolecallCallback(Training(Recorded()))
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert isinstance(copied, RolecallCallback) and copied is not callback


def test_a_wrapped_function_is_sent_as_itself() -> None:
    made = Timed(length, Training(Recorded()), "score")
    assert made.__name__ == "length"  # TRL names its metrics by it
    assert pickle.loads(pickle.dumps(made)) is length


def test_without_a_trainer_among_the_callers_there_is_none() -> None:
    assert trainer_of(RolecallCallback(Training(Recorded()))) is None


def test_a_trainer_without_rewards_is_not_changed() -> None:
    class Plain:
        pass

    plain = Plain()
    assert wrapped(plain, Training(Recorded())) == [] and vars(plain) == {}


class Judge:
    """A reward function with a state, which the job uses."""

    weight = 1.0

    def __call__(self, completions: list[str]) -> list[float]:
        return [self.weight * len(c) for c in completions]

    def warm_up(self) -> None:
        self.weight = 0.5


class Owner:
    def __init__(self, *functions: Any) -> None:
        self.reward_funcs = list(functions)

    def _generate(self, prompts: list[str]) -> list[str]:
        return prompts


def test_a_reward_function_with_a_state_stays_what_it_is() -> None:
    judge, report = Judge(), Recorded()
    training = Training(report)
    owner = Owner(judge)
    undo = wrapped(owner, training)
    training.begin_step(1)
    owner.reward_funcs[0].warm_up()
    assert owner.reward_funcs[0](completions=["ab"]) == [1.0] and report.phases[-2:] == ["score", "step"]
    owner.reward_funcs[0].weight = 2.0
    assert judge.weight == 2.0 and owner.reward_funcs[0].weight == 2.0
    for act in undo:
        act()
    assert owner.reward_funcs == [judge]


def test_what_the_job_changes_meanwhile_stays() -> None:
    owner, training = Owner(length, later), Training(Recorded())
    undo = wrapped(owner, training)
    owner.reward_funcs.append(len)
    owner._generate = len  # type: ignore[method-assign,assignment]
    for act in undo:
        act()
    assert owner.reward_funcs == [length, later, len] and owner._generate is len


def test_a_generation_that_the_job_has_replaced_before_comes_back() -> None:
    owner, other = Owner(length), Owner()
    owner._generate = other._generate  # type: ignore[method-assign]
    for act in wrapped(owner, Training(Recorded())):
        act()
    assert owner._generate == other._generate


def test_a_state_of_another_form_does_not_reach_the_job() -> None:
    callback = RolecallCallback(Training(Recorded()))
    callback.on_step_begin(None, object(), None)
