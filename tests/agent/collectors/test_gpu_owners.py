"""Ranks and their GPUs: NVML's list, children of ranks, other PID namespaces, and environments."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.agent.collectors.gpu.samples import GpuOwners, GpuOwnership, gpus_of
from rolecall.agent.identity import Registration
from rolecall.core.ids import NodeId, ProcessId

UUIDS = {n: f"GPU-{n}{n}{n}0-aa" for n in range(4)}


def rank(pid: int, number: int = 0, start_ticks: int = 1) -> Registration:
    process = ProcessId(node=NodeId("node-1"), pid=pid, start_ticks=start_ticks)
    return Registration(process=process, role="trainer", replica="trainer/0", rank=number, incarnation=1)


Add = Callable[..., None]


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """Puts a process into `tmp_path`, which is /proc here."""

    def it(pid: int, parent: int = 1, **environ: str) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} (a) b) (c) S {parent} {'0 ' * 20}")
        (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environ.items()))

    return it


def test_a_rank_uses_the_gpus_that_list_it_or_a_child_of_it(tmp_path: Path, add: Add) -> None:
    add(10)
    add(20)
    add(21, parent=20)
    add(22, parent=21)
    add(30)  # another process
    owners = GpuOwners(tmp_path)
    listed = {0: (10,), 1: (22, 10), 2: (30,), 3: ()}
    found = owners.of_gpus(listed, UUIDS, [rank(10), rank(20)])
    assert {gpu: o.pids for gpu, o in found.items()} == {0: (10,), 1: (10, 20), 2: (), 3: ()}
    assert (found[0].by, found[2]) == ("nvml", GpuOwnership())
    assert owners.of_gpus(listed, UUIDS, [rank(10), rank(20), rank(30)])[2].pids == (30,), "it registered since"
    assert owners.of_gpus(listed, UUIDS, [])[0].pids == ()


def test_nvmls_process_list_has_precedence_over_the_environment(tmp_path: Path, add: Add) -> None:
    add(10, CUDA_VISIBLE_DEVICES="3")
    add(11, CUDA_VISIBLE_DEVICES="2")
    found = GpuOwners(tmp_path).of_gpus({0: (10,), 3: ()}, UUIDS, [rank(10), rank(11, 1)])
    assert {gpu: o.pids for gpu, o in found.items() if o.pids} == {0: (10,)}


def test_another_pid_namespace_is_logged_once_and_the_environment_is_used(
    tmp_path: Path, add: Add, caplog: pytest.LogCaptureFixture
) -> None:
    add(10, LOCAL_RANK="2")
    add(11, LOCAL_RANK="3")
    owners = GpuOwners(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = owners.of_gpus({2: (70001,), 3: (70002,)}, UUIDS, [rank(10), rank(11, 1)])
    assert found == {2: GpuOwnership((10,), "environment"), 3: GpuOwnership((11,), "environment")}
    assert caplog.text.count("PID namespace") == 1


def test_an_unknown_gpu_assignment_is_logged_once(tmp_path: Path, add: Add, caplog: pytest.LogCaptureFixture) -> None:
    add(10, HOME="/root")
    add(11)
    owners = GpuOwners(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert owners.of_gpus({}, UUIDS, [rank(10), rank(11, 1)]) == {}
        assert owners.of_gpus({}, UUIDS, [rank(10), rank(11, 1), rank(12, 2)]) == {}
    assert caplog.text.count("assignment unknown") == 1 and "trainer/0 rank 0" in caplog.text


def test_an_environment_is_read_once_a_process(tmp_path: Path, add: Add) -> None:
    owners = GpuOwners(tmp_path)
    add(10, CUDA_VISIBLE_DEVICES="1")
    assert owners.of_gpus({}, UUIDS, [rank(10)])[1].pids == (10,)
    add(10, CUDA_VISIBLE_DEVICES="2")
    assert list(owners.of_gpus({}, UUIDS, [rank(10)])) == [1], "what it was started with"
    assert list(owners.of_gpus({}, UUIDS, [rank(10, start_ticks=2)])) == [2], "another process of this PID"


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, ()),
        ({"LOCAL_RANK": "2"}, (2,)),
        ({"SLURM_LOCALID": "1"}, (1,)),
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "3"}, (1,)),
        ({"LOCAL_RANK": "4"}, ()),
        ({"LOCAL_RANK": "x"}, ()),
        ({"LOCAL_RANK": "9" * 9999}, ()),
        ({"CUDA_VISIBLE_DEVICES": "3"}, (3,)),
        ({"CUDA_VISIBLE_DEVICES": "3", "LOCAL_RANK": "2"}, (3,)),
        ({"CUDA_VISIBLE_DEVICES": "3,1", "LOCAL_RANK": "1"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, (3, 1)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, (0,)),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, (0,)),
        ({"CUDA_VISIBLE_DEVICES": "7"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "GPU-222"}, (2,)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "0"}, ()),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "LOCAL_RANK": "3"}, (3,)),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, ()),
        ({"NVIDIA_VISIBLE_DEVICES": UUIDS[2]}, (2,)),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3", "LOCAL_RANK": "1"}, (3,)),
        ({"NVIDIA_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[3]}", "CUDA_VISIBLE_DEVICES": "1"}, (3,)),
    ],
)
def test_variables_of_an_environment(environ: dict[str, str], gpus: tuple[int, ...]) -> None:
    assert gpus_of(environ, UUIDS) == gpus


def test_the_only_gpu_belongs_to_the_process_with_a_local_rank() -> None:
    assert gpus_of({"LOCAL_RANK": "0"}, {0: "GPU-0"}) == (0,)
    assert gpus_of({}, {0: "GPU-0"}) == ()
