"""The optimizer of a pipeline: every rank updates its own layers, and all of them as one."""

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from step0_monolith.loss import IGNORE_INDEX, batch_weight
from step0_monolith.options import UsageError, whole
from step0_monolith.payload import Payload, PayloadError, pack, unpack
from step0_monolith.state import State, collect, counts_of, named_tensors, restore
from step0_monolith.update import not_finite, stopped, update_weights
from step5_orchestrator.agreement import Agreement
from step5_orchestrator.buckets import GradientSum
from step5_orchestrator.pipeline import Pipeline
from step5_orchestrator.replicas import Replicas
from step5_orchestrator.synchronize import check_stages, repair_replicas

Batch = tuple[Tensor | None, Tensor | None]


class PipelineParallelOptimizer:
    """Wraps an optimizer of this rank's parameters, and makes one of all ranks' optimizers.

    Every method but `serialize` and `deserialize` is called on every rank. updates: steps of the optimizer so far.
    first_wrong: what was not finite the first time that something was not.
    """

    def __init__(
        self,
        wrapped_optimizer: torch.optim.Optimizer,
        pipeline: Pipeline,
        num_microbatches: int = 1,
        max_grad_norm: float | None = None,
        *,
        accumulate: int = 1,
        on_nonfinite: str = "stop",
        lr_schedule: Callable[[int], float] | LRScheduler | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """wrapped_optimizer: over all parameters of this rank that require a gradient (a stage without any: an empty
        group). pipeline: what runs a batch. num_microbatches: into how many pieces it cuts one; the table decides, so
        it must be the table's number. max_grad_norm: largest norm of the gradients of all stages together (None: any).
        accumulate: iterations whose gradients make one update. on_nonfinite: "stop" or "skip", what to do when a loss
        or a gradient is no finite number. lr_schedule: a function from the number of updates so far to the step size,
        or one of torch's schedulers of the wrapped optimizer. replicas: of the pipeline, when there are several.

        Raises UsageError for numbers that do not fit, and for an optimizer that does not fit the pipeline.
        """
        whole(1)("num_microbatches", num_microbatches)
        if num_microbatches != pipeline.table.num_microbatches:
            raise UsageError(
                f"num_microbatches is {num_microbatches}, but the pipeline's table {pipeline.table.name} has "
                f"{pipeline.table.num_microbatches}"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UsageError(f"max_grad_norm must be above 0, not {max_grad_norm}")
        if on_nonfinite not in ("stop", "skip"):
            raise UsageError(f"on_nonfinite must be 'stop' or 'skip', not {on_nonfinite!r}")
        check_optimizer(wrapped_optimizer, pipeline)
        self.wrapped, self.pipeline, self.max_grad_norm = wrapped_optimizer, pipeline, max_grad_norm
        self.accumulate = whole(1)("accumulate", accumulate)
        self.on_nonfinite, self.lr_schedule, self.replicas = on_nonfinite, lr_schedule, replicas
        self.updates, self.iterations = 0, 0
        self._wrong: str | None = None  # with the update that is being made
        self.first_wrong: str | None = None
        everyone = pipeline.world if replicas is None else replicas.whole
        replica = None if replicas is None else replicas.index
        self._agree = Agreement(everyone, pipeline.stages, pipeline.table.num_stages, replica)
        self._sum = None if replicas is None else GradientSum(replicas.peers, pipeline.stages)

    def optimize(self, batch: Batch, *, weight: int | None = None) -> Tensor:
        """One iteration: runs the batch's microbatches forward and backward, and updates the weights.

        batch: inputs (N, ...), needed on the rank of the first stage, and targets (N,), needed on the last stage's;
        elsewhere None. With replicas: this replica's rows. weight: rows of all batches of this update together
        (default: the targets of this batch, of all replicas, that count, times `accumulate`). Gradients are set to
        zero before the first batch of an update, added up over microbatches, batches and replicas, clipped by their
        norm over all stages; then each rank's optimizer steps once, and the learning-rate schedule advances once.

        Returns the batch's loss before the update, a float64 scalar, the same on every rank. Raises UsageError for a
        batch with fewer rows than microbatches, and RunError on all ranks, with parameters and optimizer as they were,
        when the loss or a gradient anywhere is not finite (or leaves that update out, see `on_nonfinite`).
        """
        self._open(batch)
        part = self.iterations % self.accumulate
        is_last = part == self.accumulate - 1
        with_norm = is_last and self.max_grad_norm is not None
        self._agree.begin(with_norm)
        share = self._accumulate(batch, part, weight)
        if self._sum is not None and is_last:
            # As soon as this rank's row has run: the ranks before it may still be cooling down.
            self._sum()
        agreed = self._agree(share, with_norm)
        loss = agreed.loss * self.accumulate
        wrong = not_finite(self.iterations, loss, agreed.places, agreed.norm)
        self._wrong = wrong or (self._wrong if part else None)
        self.first_wrong = self.first_wrong or self._wrong
        if self._wrong and self.on_nonfinite == "stop":
            raise stopped(self._wrong)
        if is_last and not self._wrong:
            self._update(agreed.norm)
        self.iterations += 1
        return torch.tensor(loss, dtype=torch.float64)

    def _accumulate(self, batch: Batch, part: int, weight: int | None) -> Tensor:
        """Runs batch number `part` of an update and adds its gradients to those of the batches before it.

        Before the first there are none. Each batch is weighed as its piece of one batch that is `accumulate` times as
        large. Returns what this rank knows of that piece's share of the loss.
        """
        # BEGIN SOLUTION step5.accumulate
        if part == 0:
            self.wrapped.zero_grad()
        weight = self._weight(batch[1]) * self.accumulate if weight is None else weight
        update, first = self.iterations // self.accumulate, self._first_microbatch(part)
        return self.pipeline.forward_backward(*batch, update, first_microbatch=first, weight=weight)
        # END SOLUTION

    def _update(self, norm: float | None) -> None:
        is_scheduler = isinstance(self.lr_schedule, LRScheduler)
        rate = None if is_scheduler or self.lr_schedule is None else self.lr_schedule(self.updates)
        update_weights(self.wrapped, rate, norm, self.max_grad_norm)
        if is_scheduler:
            self.lr_schedule.step()
        self.updates += 1

    def _open(self, batch: Batch) -> None:
        """Agrees on the messages for batches of this shape, the first time and whenever the batch is seen to change."""
        pipeline, (inputs, targets) = self.pipeline, batch
        for needed, name, value in ((pipeline.is_first, "inputs", inputs), (pipeline.is_last, "targets", targets)):
            if needed and value is None:
                raise UsageError(f"rank {pipeline.world.whole.rank} needs the {name} of the batch, and has None")
        agreed = pipeline.agreed("train")
        if agreed is None:
            self._tell_shape(inputs)
        elif inputs is not None:
            pipeline.open("train", tuple(inputs.shape), inputs.dtype)
        rows = pipeline.agreed("train")[0][0]
        if targets is not None and len(targets) != rows:
            raise UsageError(f"the batch has {rows} rows of inputs, and {len(targets)} of targets")

    def _tell_shape(self, inputs: Tensor | None) -> None:
        """Before the first batch the rank of the first stage tells the others what it looks like."""
        world = self.pipeline.world
        key = world.new_key("first batch")
        source = self.pipeline.table.rank_of_stage[0]
        if world.rank == source:
            world.store.set(key, pack({"rows": torch.empty(0, *inputs.shape, dtype=inputs.dtype)}, {}))
        found = unpack(world.fetch(key, "the shape of the first batch", source)).tensors["rows"]
        self.pipeline.open("train", tuple(found.shape[1:]), found.dtype)

    def _weight(self, targets: Tensor | None) -> int:
        """Targets that count, of all replicas' batches; on the last stages' ranks, where they are needed."""
        if not self.pipeline.is_last:
            return 1
        if self.replicas is None:
            return batch_weight(targets)
        # Not the sum of weights: that of a replica whose targets are all ignored is 1.
        count = (targets != IGNORE_INDEX).sum().cpu().view(1)
        return max(1, int(self.replicas.peers.sum(count).item()))

    def _first_microbatch(self, part: int) -> int:
        replica, count = (0, 1) if self.replicas is None else (self.replicas.index, self.replicas.num_replicas)
        return (part * count + replica) * self.pipeline.table.num_microbatches

    def state(self) -> State:
        """A snapshot of this rank's layers and their optimizer's state. Raises RuntimeError between two updates, when
        gradients are added up that no snapshot holds.
        """
        part = self.iterations % self.accumulate
        if part:
            raise RuntimeError(f"{part} of {self.accumulate} iterations are added up; save after the update")
        state = collect(self.pipeline.layers(), self.wrapped)
        scalars = {"updates": self.updates, "iterations": self.iterations}
        if isinstance(self.lr_schedule, LRScheduler):
            scalars["lr_scheduler"] = _scheduler_state(self.lr_schedule)
        return State(state.tensors, {**state.scalars, **scalars})

    def serialize(self) -> bytes:
        """This rank's layers, their optimizer's state, and how far training has come, as bytes with a checksum.

        A safetensors file with JSON in its header; it holds no code. Raises RuntimeError between two updates.
        """
        return pack(*self.state())

    def deserialize(self, *payloads: bytes) -> None:
        """Takes what this rank owns out of the bytes that any ranks' `serialize` has made.

        Layers are found by their global index, so payloads of another number of ranks, another schedule or another
        number of microbatches will do. Raises PayloadError, with nothing changed here, for bytes that are damaged or
        of something else, and for layers that are in none of them, by number.
        """
        count = len(payloads)
        self.load([unpack(data, f"payload {i} of {count}") for i, data in enumerate(payloads, 1)])

    def load(self, payloads: Sequence[Payload]) -> None:
        """As `deserialize`, from payloads that were unpacked already."""
        if not payloads:
            raise PayloadError("nothing to load: no payload was given")
        updates, iterations = counts_of(payloads)
        if iterations % self.accumulate:
            raise PayloadError(
                f"saved after {iterations} iterations, between two updates of {self.accumulate} iterations each"
            )
        schedule = payloads[0].scalars.get("lr_scheduler")
        if isinstance(self.lr_schedule, LRScheduler) and not _fits(schedule, self.lr_schedule):
            raise PayloadError("the payloads hold no state of such a learning-rate scheduler")
        restore(self.pipeline.layers(), self.wrapped, payloads)
        self.updates, self.iterations = updates, iterations
        if isinstance(self.lr_schedule, LRScheduler):
            self.lr_schedule.load_state_dict(schedule)

    def synchronize_optimizer_state(self) -> list[str]:
        """Compares what all ranks must have in common, and repairs what can be repaired.

        Replicas have the same parameters, moments and settings; one that has drifted is set to replica 0's. Stages
        have the same number of updates, the same optimizer, step counters and settings. Returns what differed and was
        repaired, in words, the same list on every rank. Raises RunError on every rank, with both values, when stages do
        not agree.
        """
        repaired = [] if self.replicas is None else repair_replicas(self.replicas, self)
        check_stages(self.pipeline.world, self)
        return repaired


def check_optimizer(optimizer: torch.optim.Optimizer, pipeline: Pipeline) -> None:
    """Raises UsageError unless the optimizer updates exactly the parameters here that require a gradient."""
    if any(p.default is p.empty and p.name == "closure" for p in inspect.signature(optimizer.step).parameters.values()):
        raise UsageError(f"{type(optimizer).__name__} runs the model several times a step, which a pipeline cannot")
    names = {id(value): name for name, value in named_tensors(pipeline.layers()).items()}
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if own - names.keys():
        raise UsageError("the optimizer has a parameter that is in no stage of this rank")
    for parameter in pipeline.parameters():
        if parameter.requires_grad and id(parameter) not in own:
            raise UsageError(f"{names[id(parameter)]} requires a gradient, and the optimizer does not have it")


def _scheduler_state(scheduler: LRScheduler) -> Mapping[str, object]:
    return {"class": type(scheduler).__name__, **scheduler.state_dict()}


def _fits(saved: object, scheduler: LRScheduler) -> bool:
    return (
        isinstance(saved, dict)
        and saved.keys() == _scheduler_state(scheduler).keys()
        and saved["class"] == type(scheduler).__name__
    )
