"""A job that rolecall can watch: torchrun --standalone --nproc-per-node 2 examples/torchrun/train.py [STEPS]"""

import sys
import time

import torch
import torch.distributed as dist

from rolecall import reporter

dist.init_process_group("gloo")
reporter.start()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(int(sys.argv[1]) if len(sys.argv) > 1 else 6000):
    with reporter.step(n):
        optimizer.zero_grad()
        model(torch.randn(256, 64)).square().mean().backward()  # averages the gradients of all ranks
        optimizer.step()
        time.sleep(0.1)  # a longer computation
dist.destroy_process_group()
