"""The ranks of one trainer replica: processes that hold a shard of each tensor, and compute each step together.

Inside a replica the model is sharded with FSDP2 (`fully_shard`, arXiv 2304.11277): a rank holds its rows of every
parameter, gathers a layer's weights while it computes with them, and keeps its shard of the summed gradient. Each rank
computes other rows of a microbatch. Across replicas rank k reduces, votes and copies with rank k of the others
(`reduce.py`, `service.py`).

With tensor parallelism the ranks are a mesh (shard, tensor), in which the second index varies fastest. The tensor ranks
of one shard compute the same rows of a microbatch, each with its part of the layers (`tensor_parallel.py`), and FSDP2
cuts what a tensor rank has. What they have in common stays equal bit for bit: a gradient of it is the result of one
all-reduce, which all of them get, and lies at the same place of vectors of equal length, so that replicas add it in the
same order.

All ranks make the same calls in the same order. Where one of them alone could fail, they agree first (`agree`), so that
they all go on or all stop. A rank that ends takes its replica with it (`rank_processes.py`).
"""

import json
import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rolecall.core.config.job import DeviceName
from rolecall.rl_runtime.device import BACKENDS
from rolecall.rl_runtime.exchanges import exchange
from rolecall.rl_runtime.tensor_parallel import Style, share_layers

GROUP_NAME: Final = "ranks"
SHARD, TENSOR = "shard", "tensor"


class Ranks:
    """This process's place among the ranks of its replica, and their collectives. One rank has none to wait for."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        tensor: int = 1,
        host: str = "",
        port: int = 0,
        seconds: float = 0.0,
        device: DeviceName = "cpu",
    ) -> None:
        """Waits for all `size` ranks at the store `host`:`port`, and makes their process group the default one.

        `tensor`: how many of them share each layer; it divides `size`.
        `seconds`: longest wait for another rank, here and in each collective.
        `device`: of all ranks; on GPUs each has that of its own number among those of the replica.

        Raises:
            RuntimeError: not all ranks arrived in time.
        """
        self.rank, self.size = rank, size
        self.num_shards, self.num_tensor = size // tensor, tensor
        self.shard_index, self.tensor_index = divmod(rank, tensor)
        self.device = torch.device(device) if device == "cpu" else torch.device(device, rank)
        """What this rank computes on, and has its tensors on."""
        if device != "cpu":
            torch.accelerator.set_device_index(rank)  # FSDP2 and NCCL take the current one
        self._mesh: Any = None
        if size == 1:
            return
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        # The ranks of a replica are on one node.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        timeout = timedelta(seconds=seconds)
        with exchange():
            store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
            dist.init_process_group(
                BACKENDS[device], store=PrefixStore(GROUP_NAME, store), rank=rank, world_size=size, timeout=timeout
            )
            self._mesh = init_device_mesh(device, (self.num_shards, tensor), mesh_dim_names=(SHARD, TENSOR))

    @property
    def is_first(self) -> bool:
        """Rank 0 answers for its replica."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (of JSON types), by rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with exchange():
            dist.all_gather_object(found, json.dumps(value))
        return [json.loads(text) for text in found]

    def agree(self, failure: str = "") -> str:
        """The first rank's failure that is not empty, the same at every rank."""
        return next((text for text in self.gather(failure) if text), "")

    def norm(self, local: float) -> float:
        """Norm of a vector from the norms of its parts at each rank."""
        return local if self.size == 1 else math.sqrt(math.fsum(x * x for x in self.gather(local)))

    def sum(self, tensor: Tensor, over: str = SHARD) -> Tensor:
        """The sum over the ranks along an axis of the mesh, in place."""
        if self._num(over) > 1:
            import torch.distributed as dist

            with exchange():
                dist.all_reduce(tensor, group=self._mesh.get_group(over))
        return tensor

    def shard(self, module: Any, dtype: torch.dtype | None = None, exact: Sequence[nn.Module] = ()) -> dict[str, Style]:
        """Replaces each parameter by this rank's part of it. Gradients are sums over the shards, not means, in the
        parameters' own dtype.

        `dtype`: weights are rounded to it when they are gathered; None: they are not. `exact`: modules inside whose
        weights are never rounded. Returns how tensor ranks share parameters: see `share_layers`.

        Raises:
            ConfigError: tensor ranks cannot share this architecture.
        """
        styles: dict[str, Style] = {}
        if self.num_tensor > 1:
            body, group = module.base_model, self._mesh.get_group(TENSOR)
            [path] = [name for name, m in module.named_modules() if m is body]
            of_body = share_layers(body, rank=self.tensor_index, ranks=self.num_tensor, group=group)
            styles = {f"{path}.{name}": style for name, style in of_body.items()}
        if self.num_shards > 1:
            self._shard_rows(module, dtype, exact)
        return styles

    def _shard_rows(self, module: nn.Module, dtype: torch.dtype | None, exact: Sequence[nn.Module]) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from rolecall.rl_runtime.trainer.sharding_exchanges import GatherExchange, ScatterExchange

        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
        inner = {id(m) for outer in lists for m in outer.modules() if m is not outer}
        layers = [layer for outer in lists if id(outer) not in inner for layer in outer]
        summed = None if dtype is None else torch.float32
        rounded = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=summed, cast_forward_inputs=False)
        unrounded = [] if dtype is None else [(part, MixedPrecisionPolicy()) for part in exact]
        # The root, too, is resharded after its forward pass: only then are its shards what a parameter holds.
        for part, policy in (*unrounded, *((part, rounded) for part in (*layers, module))):
            sharded = fully_shard(part, mesh=self._mesh[SHARD], reshard_after_forward=True, mp_policy=policy)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_custom_all_gather(GatherExchange())
            sharded.set_custom_reduce_scatter(ScatterExchange())

    def local(self, parameter: Any) -> Tensor:
        """This rank's part of a parameter of a sharded module, in the same memory."""
        found: Tensor = parameter.detach() if self.num_shards == 1 else parameter.detach().to_local()
        return found

    def gathered(self, parameter: Any, cut: int | None = None) -> Tensor:
        """As `whole`, of a parameter of a sharded module; all ranks call it."""
        return self.whole(self.local(parameter), parameter.shape, cut)

    def part(self, whole: Tensor, cut: int | None = None) -> Tensor:
        """What this rank holds of a tensor: rows, as FSDP2 cuts it, after tensor ranks have cut dimension `cut`."""
        if cut is not None and cut < whole.dim():
            whole = _chunk(whole, self.tensor_index, self.num_tensor, cut)
        return _chunk(whole, self.shard_index, self.num_shards, 0)

    def whole(self, local: Tensor, shape: Sequence[int], cut: int | None = None) -> Tensor:
        """The tensor whose `part` here is `local`, or a copy; all ranks call it, each gets all of it.

        `shape`: of what the shards have together.
        """
        found = self._joined(local, shape, SHARD, 0)
        if cut is None:
            return found
        return self._joined(found, [n * (self.num_tensor if d == cut else 1) for d, n in enumerate(shape)], TENSOR, cut)

    def _joined(self, local: Tensor, shape: Sequence[int], over: str, cut: int) -> Tensor:
        if self._num(over) == 1:
            return local
        from torch.distributed.tensor import DTensor, Shard

        size = torch.Size(shape)
        stride = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
        part = DTensor.from_local(
            local.contiguous(), self._mesh[over], [Shard(cut)], run_check=False, shape=size, stride=stride
        )
        with exchange():
            full: Tensor = part.full_tensor()
        return full

    def _num(self, axis: str) -> int:
        return self.num_shards if axis == SHARD else self.num_tensor

    def close(self) -> None:
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()


def _chunk(whole: Tensor, number: int, of: int, dim: int) -> Tensor:
    parts = whole.chunk(of, dim)
    return parts[number] if number < len(parts) else whole.narrow(dim, 0, 0)


ALONE: Final = Ranks()
"""A replica of one rank."""


def dealt(lengths: Sequence[int], shards: int) -> list[list[int]]:
    """Rows of each shard: every one gets about as many tokens. One shard: all rows, in their order."""
    if shards == 1:
        return [list(range(len(lengths)))]
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [order[shard::shards] for shard in range(shards)]
