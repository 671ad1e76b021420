"""A table run by hand: bare messages, bare arithmetic, nothing checked. What is left is what the machine itself takes.

Written for the model and the equal microbatches that are measured here, and for nothing else: linear layers, one tensor
a message, B whole. Where a message is late, has another shape, or its sender is gone, this hangs or computes nonsense.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from step0_monolith.config import Config
from step0_monolith.data import batch, microbatches
from step0_monolith.loss import loss_share
from step0_monolith.update import make_optimizer
from step2_comms.world import World
from step4_sharded.shard import shard
from step5_orchestrator.actions import Action, needs
from step5_orchestrator.executor import Event
from step5_orchestrator.lowering import Receive, Send, lower, post_ahead
from step5_orchestrator.table import Table


class ByHand:
    """One rank's row as a list of calls; one call runs an iteration. events: of the latest, if they are wanted."""

    def __init__(self, config: Config, world: World, table: Table, *, with_events: bool = False) -> None:
        """Opens two groups, one a direction; called on every rank. The table uses F and B alone."""
        self.stages = {i: shard(config, table.num_stages, i, None, world.device) for i in table.stages_of(world.rank)}
        self._optimizer = make_optimizer(config, [p for stage in self.stages.values() for p in stage.parameters()])
        self._groups = {kind: dist.new_group(timeout=world.timeout) for kind in ("activation", "gradient")}
        inputs, targets = batch(config, 0)
        self._inputs = microbatches(inputs.to(world.device), config.num_microbatches)
        self._targets = microbatches(targets.to(world.device), config.num_microbatches)
        self._batch_size, self._last = config.batch_size, table.num_stages - 1
        self._shape = (len(self._inputs[0]), config.width)
        self._like = partial(torch.empty, self._shape, dtype=config.torch_dtype, device=world.device)
        self._came: dict[tuple[str, int, int], tuple[dist.Work, Tensor]] = {}
        self._made: dict[tuple[str, int, int], Tensor] = {}
        self._saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self.events: list[Event] = []
        run = self._timed if with_events else self._run
        # Every receive is posted at the start, as in a pipeline whose messages are small.
        row = post_ahead(lower(table)[world.rank], lambda value: 0)
        self._calls = [self._call(instruction, run) for instruction in row]

    def __call__(self) -> None:
        """One iteration."""
        self._optimizer.zero_grad()
        self.events = []
        for call in self._calls:
            call()
        while self._sent:
            self._sent.pop()[0].wait()
        self._made.clear()
        self._optimizer.step()

    def close(self) -> None:
        """Closes the groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)

    def _call(self, instruction, run) -> Callable[[], None]:
        if isinstance(instruction, Send):
            return partial(self._send, tuple(instruction.value), instruction.peer)
        if isinstance(instruction, Receive):
            return partial(self._receive, tuple(instruction.value), instruction.peer)
        return partial(run, instruction, self._forward if instruction.op == "F" else self._backward)

    def _send(self, value: tuple[str, int, int], peer: int) -> None:
        tensor = self._made.pop(value).detach()
        self._sent.append((dist.isend(tensor, peer, group=self._groups[value[0]]), tensor))

    def _receive(self, value: tuple[str, int, int], peer: int) -> None:
        tensor = self._like()
        self._came[value] = dist.irecv(tensor, peer, group=self._groups[value[0]]), tensor

    def _take(self, value: tuple[str, int, int]) -> Tensor:
        if value not in self._came:
            return self._made.pop(value)
        work, tensor = self._came.pop(value)
        work.wait()
        return tensor

    def _run(self, action: Action, run: Callable[..., None]) -> None:
        stage, op, m = action
        given = (op == "F" and stage == 0) or (op == "B" and stage == self._last)
        run(stage, m, None if given else self._take(tuple(needs(action)[0])))

    def _timed(self, action: Action, run: Callable[..., None]) -> None:
        stage, op, m = action
        given = (op == "F" and stage == 0) or (op == "B" and stage == self._last)
        taken = None if given else self._take(tuple(needs(action)[0]))
        start = time.perf_counter()
        run(stage, m, taken)
        self.events.append(Event(action, start, time.perf_counter()))

    def _forward(self, stage: int, m: int, x: Tensor | None) -> None:
        x = self._inputs[m] if x is None else x.detach().requires_grad_()
        y = x
        for layer in self.stages[stage].modules:
            y = layer(y)
        if stage == self._last:
            y = loss_share(y, self._targets[m], self._batch_size)
        else:
            self._made["activation", stage + 1, m] = y
        self._saved[stage, m] = x, y

    def _backward(self, stage: int, m: int, gradient: Tensor | None) -> None:
        x, y = self._saved.pop((stage, m))
        torch.autograd.backward(y, gradient)
        if stage:
            self._made["gradient", stage, m] = x.grad
