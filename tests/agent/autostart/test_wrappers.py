"""The hooks in models that torch's own wrappers hold: nothing changes in what they compute."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from rolecall.agent.autostart.training import TrainingWatch, issued_collectives
from tests.agent.autostart.test_training import Clock, Report

STEPS, HOOKED_FROM = 7, 3
Wrap = Callable[[torch.nn.Module], torch.nn.Module]
CPU = torch.device("cpu")
WRAPPERS: dict[str, tuple[Wrap, bool]] = {
    "plain": (lambda net: net, True),
    "DDP": (lambda net: DistributedDataParallel(net), True),
    "DDP, static graph": (lambda net: DistributedDataParallel(net, static_graph=True), True),
    "DDP, views of buckets": (lambda net: DistributedDataParallel(net, gradient_as_bucket_view=True), True),
    "FSDP, original parameters": (
        lambda net: FullyShardedDataParallel(net, device_id=CPU, use_orig_params=True),
        False,
    ),
    "FSDP, flat parameters": (lambda net: FullyShardedDataParallel(net, device_id=CPU), False),
    "FSDP2": (lambda net: fully_shard(net), False),
}
"""And whether their gradients are hooked."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    assert issued_collectives() == -1


def losses(wrap: Wrap) -> list[float]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    model = wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(STEPS):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_trains_as_without_hooks(name: str) -> None:
    wrap, has_gradients = WRAPPERS[name]
    expected = losses(wrap)
    report = Report()
    watch = TrainingWatch(report, torch, Clock())
    handle = register_optimizer_step_post_hook(watch.after_optimizer)
    try:
        assert losses(wrap) == expected and math.isfinite(expected[-1])
    finally:
        watch.stand_down()
        handle.remove()
    assert report.steps == list(range(1, STEPS + 1)) and report.phases.count("step") == STEPS - 2
    assert report.exchanges == (STEPS - HOOKED_FROM if has_gradients else 0)


def test_the_collectives_of_the_default_group_are_counted() -> None:
    before = issued_collectives()
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    assert issued_collectives() > before >= 0
