"""The bare program that a start is compared with: imports torch, opens a group, does one sum over all ranks, says so.

Under torchrun. With the argument `step` it also runs one iteration of a small layer with torch's own optimizer.
"""

import os
import sys

import torch
import torch.distributed as dist

SAYS = "bare: the first sum is done"


def main() -> None:
    """What a program of one's own would start with; the file is as short as it can be, so that it is the floor."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1:] == ["step"]:
        layer = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        y = layer(torch.ones(4, 64))
        y.backward(torch.ones_like(y))
        optimizer.step()
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        print(SAYS, flush=True)
    dist.destroy_process_group()
    # Nothing is measured any more, and now and then a process that has computed gradients aborts in its usual end.
    os._exit(0)


if __name__ == "__main__":
    main()
