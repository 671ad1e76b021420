"""The sum of all replicas' gradients, a few large messages a stage instead of one a parameter."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from step1_partition.stage import Stage
from step2_comms.world import World

BUCKET_BYTES = 4 * 2**20


class UnderWay(NamedTuple):
    """A bucket on its way: its parameters, the flat tensor that is being summed, and what to wait for."""

    parameters: Sequence[nn.Parameter]
    flat: Tensor
    work: dist.Work


class GradientSum:
    """Adds up the gradients of the ranks that hold the same stages, each replica's, on all of them.

    A replica's gradients are already its share of those of the whole batch, since each row weighs 1/B there: their sum
    is the gradient, and nothing is left to divide. Every replica gets the same bits, for each element is added up in
    one order and then handed out.
    """

    def __init__(self, peers: World, stages: Mapping[int, Stage], bucket_bytes: int = BUCKET_BYTES) -> None:
        """peers: the ranks with the same stages."""
        self._peers, self._stages, self._bucket_bytes = peers, dict(stages), bucket_bytes

    def __call__(self) -> None:
        """Makes every gradient the sum; called by all peers. One bucket travels while the next is filled."""
        parameters = [p for index in sorted(self._stages) for p in self._stages[index].parameters()]
        # Anew each time: a parameter may have been frozen or unfrozen since.
        under_way = [self._start(bucket) for bucket in buckets(parameters, self._bucket_bytes)]
        for parameters, flat, work in under_way:
            with self._waiting():
                work.wait()
            _unflatten(parameters, flat)

    def _start(self, parameters: Sequence[nn.Parameter]) -> UnderWay:
        flat = _flatten(parameters)
        if self._peers.is_staged:
            flat = flat.cpu()
        with self._waiting():
            return UnderWay(parameters, flat, dist.all_reduce(flat, group=self._peers.group, async_op=True))

    def _waiting(self):
        peer = self._peers.ranks[1 - self._peers.rank] if self._peers.size == 2 else None
        return self._peers.watch.waiting("sum of the replicas' gradients", peer)


def buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters that need a gradient, in their order, as lists of one dtype and of at most so many bytes (or one)."""
    found: list[list[nn.Parameter]] = []
    room: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        bucket, used = room.get(parameter.dtype, ([], bucket_bytes))
        if used + parameter.nbytes > bucket_bytes:
            bucket, used = [], 0
            found.append(bucket)
        bucket.append(parameter)
        room[parameter.dtype] = (bucket, used + parameter.nbytes)
    return found


def _flatten(parameters: Sequence[nn.Parameter]) -> Tensor:
    """All gradients one after another, and before them for each parameter whether it has one."""
    has = torch.tensor([float(p.grad is not None) for p in parameters])
    first = parameters[0]
    return torch.cat(
        [
            has.to(first),
            *((torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1) for p in parameters),
        ]
    )


def _unflatten(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    has, values = flat[: len(parameters)].tolist(), flat[len(parameters) :]
    for number, parameter, value in zip(has, parameters, values.split([p.numel() for p in parameters]), strict=True):
        if not number:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(value.view_as(parameter))
