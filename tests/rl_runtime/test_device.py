"""Which device a job computes on, and who gets which GPU.

pytest tests/rl_runtime/test_device.py
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rolecall.core.config.job import DeviceName, JobConfig, parse_job
from rolecall.core.errors import ConfigError
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.rl_runtime.device import Hardware, device_of, found_hardware, gpus_of_nodes, num_gpus
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


def test_all_nodes_but_the_first_share_the_gpus_equally() -> None:
    assert gpus_of_nodes(job(4), EIGHT) == {
        NodeId("node-0"): (),
        NodeId("node-1"): ("0", "1"),
        NodeId("node-2"): ("2", "3"),
        NodeId("node-3"): ("4", "5"),
    }
    assert gpus_of_nodes(job(4, "cpu"), EIGHT) == {}


def test_a_node_takes_any_replica_or_the_job_is_refused() -> None:
    assert len(gpus_of_nodes(job(3, trainer_ranks=4), EIGHT)[NodeId("node-2")]) == 4
    with pytest.raises(ConfigError, match=r"runtime\.nodes: .* 3 nodes with 4 GPUs each.* this machine has 8: fewer"):
        gpus_of_nodes(job(4, trainer_ranks=4), EIGHT)


def test_an_actor_requests_a_gpu_for_each_rank_where_its_role_computes() -> None:
    runtime = job(trainer_ranks=2, rollout_ranks=4).runtime
    wanted = {"trainer/1": 2, "rollout/0": 4, "standby/0": 4, "trainer-standby/0": 2, "reward/0": 0, "controller/0": 0}
    assert {name: num_gpus(ReplicaId(name), "cuda", runtime) for name in wanted} == wanted
    assert {num_gpus(ReplicaId(name), "cpu", runtime) for name in wanted} == {0}


def test_an_engine_is_sized_by_bytes_on_a_cpu_and_by_its_share_on_a_gpu() -> None:
    on_cpu = EngineSettings(model_dir="m", kv_cache_bytes=1 << 20)
    assert _device_arguments(on_cpu) == {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 20}
    on_gpu = EngineSettings(model_dir="m", device="cuda", memory_share=0.5)
    assert _device_arguments(on_gpu) == {"enforce_eager": False, "gpu_memory_utilization": 0.5}
    assert _device_arguments(replace(on_gpu, cuda_graphs=False))["enforce_eager"]
