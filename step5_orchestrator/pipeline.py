"""A pipeline: stages on ranks, a table, and messages; runs a batch and returns its loss on every rank."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from step0_monolith.data import microbatches
from step0_monolith.loss import batch_weight, loss_share, total
from step0_monolith.model import Tensors, evaluating
from step0_monolith.reference import metrics
from step1_partition.batch_norm import check_batch_norm
from step1_partition.stage import Stage
from step2_comms.contract import Spec
from step2_comms.p2p import Messages
from step2_comms.world import World
from step4_sharded.boundaries import agree_on_boundaries
from step5_orchestrator.costs import Cost
from step5_orchestrator.executor import Executor, edges
from step5_orchestrator.legality import check
from step5_orchestrator.lowering import lower
from step5_orchestrator.naive import forward_only
from step5_orchestrator.table import Table, TableError


class Pipeline:
    """This rank's part of a pipeline.

    Every method is called on every rank. The batch's inputs are needed on the rank of the first stage and its targets
    on the rank of the last; elsewhere they may be None.
    """

    def __init__(
        self,
        world: World,
        stages: Mapping[int, Stage],
        table: Table,
        *,
        seed: int = 0,
        emulate: Cost | None = None,
        share: Callable[[Tensor, Tensor, int], Tensor] = loss_share,
    ) -> None:
        """stages: this rank's, by stage number, as the table has them. share: a microbatch's share of the loss.

        Raises TableError, before any message, for a table that cannot be run here.
        """
        check(table)
        if table.num_ranks != world.size:
            raise TableError(f"{table.name} has {table.num_ranks} rows, but there are {world.size} ranks")
        if sorted(stages) != table.stages_of(world.rank):
            raise TableError(f"{table.name} has stages {table.stages_of(world.rank)} here, not {sorted(stages)}")
        cannot_split = [stage for stage in stages.values() if not hasattr(stage, "backward_weights")]
        if "W" in table.ops and cannot_split:
            raise TableError(f"{table.name} splits the backward into I and W, which the stages here cannot")
        self.world, self.stages, self.table = world, dict(stages), table
        self._seed, self._share = seed, share
        self.is_first = 0 in stages
        self.is_last = table.num_stages - 1 in stages
        evaluation = forward_only(table)
        rows, evaluation_rows = lower(table), lower(evaluation)
        self.messages = Messages(world, [*edges(rows), *edges(evaluation_rows)], emulate.comm / 1e3 if emulate else 0.0)
        self.executor = Executor("train", world, self.stages, table, rows[world.rank], self.messages, emulate=emulate)
        self._evaluation = Executor(
            "evaluate", world, self.stages, evaluation, evaluation_rows[world.rank], self.messages
        )
        self._agreed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's parameters, in layer order."""
        return list({id(p): p for index in sorted(self.stages) for p in self.stages[index].parameters()}.values())

    def layers(self) -> dict[int, torch.nn.Module]:
        """This rank's layers by their global index."""
        return {i: m for stage in self.stages.values() for i, m in enumerate(stage.modules, stage.first_layer)}

    def agreed(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of the batches that the pass `name` was opened for, if it was."""
        return self._agreed.get(name)

    def open(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Agrees on the messages of the pass `name` for whole batches of `shape` (B, ...) and `dtype`.

        Called on every rank with the same values, before the first batch and whenever the shape changes; calling it
        again with the same shape costs nothing. Raises UsageError for a batch that cannot be cut into the table's
        microbatches.
        """
        wanted = (tuple(shape), dtype)
        if self._agreed.get(name) == wanted:
            return
        num_microbatches = self.table.num_microbatches
        if name == "train" and shape[0] < num_microbatches:
            raise TableError(f"{shape[0]} rows cannot be cut into {num_microbatches} microbatches; give each a row")
        pieces = [tuple(piece.shape) for piece in microbatches(torch.empty(shape, device="meta"), num_microbatches)]
        if name == "train":
            for stage in self.stages.values():
                check_batch_norm(stage.modules, [piece[0] for piece in pieces], stage.first_layer)
        inputs = [(Spec(piece, dtype),) for piece in pieces]
        with contextlib.nullcontext() if name == "train" else self._evaluating():
            boundaries = agree_on_boundaries(self.world, self.stages, self.table.rank_of_stage, inputs, name)
        (self.executor if name == "train" else self._evaluation).agree(boundaries)
        self._agreed[name] = wanted

    def run(self, inputs: Tensor | None, targets: Tensor | None, iteration: int = 0) -> Tensor:
        """One batch forward and backward: adds to the gradients, returns the batch's loss (float64) on every rank."""
        return self._from_last(self.forward_backward(inputs, targets, iteration))

    def forward_backward(
        self,
        inputs: Tensor | None,
        targets: Tensor | None,
        iteration: int = 0,
        *,
        first_microbatch: int = 0,
        weight: int | None = None,
    ) -> Tensor:
        """As `run`, but the loss is on the last stage's rank alone, and 0 on the others.

        first_microbatch: the number of the first, for dropout's draws. weight: rows that the loss is divided by
        (default: those of this batch that count); where the batch is a piece of a larger one, the rows of the whole.
        """
        losses = None
        if self.is_last:
            targets = targets.to(self.world.device)
            weight = batch_weight(targets) if weight is None else weight
            pieces = microbatches(targets, self.table.num_microbatches)
            losses = [partial(self._share, targets=piece, weight=weight) for piece in pieces]
        shares = self.executor.run(
            self._cut(inputs), losses, seed=self._seed, iteration=iteration, first_microbatch=first_microbatch
        )
        return total([share for (share,) in shares]) if self.is_last else torch.zeros((), dtype=torch.float64)

    def evaluate(self, inputs: Tensor | None, targets: Tensor | None) -> dict[str, float]:
        """`accuracy` and `loss` on every rank, forward only, in evaluation mode; nothing else changes."""
        with self._evaluating():
            outputs = self._evaluation.run(self._cut(inputs), None)
        values = torch.zeros(2, dtype=torch.float64)
        if self.is_last:
            found = metrics([output for (output,) in outputs], targets.to(self.world.device))
            values = torch.tensor([found["accuracy"], found["loss"]], dtype=torch.float64)
        accuracy, loss = self._from_last(values).tolist()
        return {"accuracy": accuracy, "loss": loss}

    def close(self) -> None:
        """Waits for the messages under way and closes the communicators."""
        self.messages.close()

    def _evaluating(self) -> contextlib.AbstractContextManager:
        return evaluating([module for stage in self.stages.values() for module in stage.modules])

    def _cut(self, inputs: Tensor | None) -> list[Tensors] | None:
        if not self.is_first:
            return None
        pieces = microbatches(inputs.to(self.world.device), self.table.num_microbatches)
        return [(piece,) for piece in pieces]

    def _from_last(self, value: Tensor) -> Tensor:
        if self.world.size == 1:
            return value
        return self.world.broadcast(value, self.table.rank_of_stage[-1])
