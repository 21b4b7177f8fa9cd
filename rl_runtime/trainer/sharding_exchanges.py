"""The collectives of FSDP2 as exchanges: layers gathered before they compute, gradients reduced to their shards."""

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from rolecall.rl_runtime.exchanges import exchange


class GatherExchange(DefaultAllGather):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with exchange():
            return super().__call__(*args, **kwargs)


class ScatterExchange(DefaultReduceScatter):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with exchange():
            return super().__call__(*args, **kwargs)
