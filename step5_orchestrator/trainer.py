"""Training with a pipeline: data in at the first stage, loss out at the last, one optimizer step an iteration."""

import statistics
import time
from collections.abc import Sequence

from step0_monolith.config import NUM_FEATURES, NUM_TEST_ROWS, Config
from step0_monolith.data import batch, test_set
from step0_monolith.progress import Progress
from step0_monolith.result import Result, weights_sha256
from step0_monolith.update import make_optimizer, step
from step1_partition.stage import Stage
from step2_comms.world import World
from step4_sharded.shard import shard
from step5_orchestrator.costs import UNIT_COST, Cost
from step5_orchestrator.executor import Event
from step5_orchestrator.gather import gather_parameters
from step5_orchestrator.global_norm import GlobalNorm
from step5_orchestrator.pipeline import Pipeline
from step5_orchestrator.prediction import bubble
from step5_orchestrator.table import Table

WARM_UP_ITERATIONS = 2


class Trainer:
    """Trains this rank's stages; every method is called on every rank."""

    def __init__(
        self,
        config: Config,
        world: World,
        table: Table,
        *,
        layers_per_stage: Sequence[int] | None = None,
        emulate: Cost | None = None,
        cost: Cost = UNIT_COST,
        stage_class: type[Stage] = Stage,
    ) -> None:
        """Builds this rank's stages, opens the pipeline and agrees on all messages of training and evaluation.

        emulate: milliseconds that actions and messages take at least. cost: what the prediction takes them to cost when
        they are not emulated. stage_class: of the stages; a table that splits the backward needs one that can.
        """
        self.config, self.world, self.table, self._emulate = config, world, table, emulate
        self.predicted_cost = emulate or cost
        stages = {
            index: shard(config, table.num_stages, index, layers_per_stage, world.device, stage_class)
            for index in table.stages_of(world.rank)
        }
        self.pipeline = Pipeline(world, stages, table, seed=config.seed, emulate=emulate)
        self.pipeline.open("train", (config.batch_size, NUM_FEATURES), config.torch_dtype)
        self.has_test = config.data == "digits"
        if self.has_test:
            self.pipeline.open("evaluate", (NUM_TEST_ROWS, NUM_FEATURES), config.torch_dtype)
        self._optimizer = make_optimizer(config, self.pipeline.parameters())
        self._norm = GlobalNorm(world, stages, table.num_stages) if config.max_grad_norm is not None else None
        self._reads_data = self.pipeline.is_first or self.pipeline.is_last
        self.iteration = 0
        self.losses: list[float] = []
        self.iteration_seconds: list[float] = []
        # For each iteration: first start, last end, and seconds inside actions, on this rank.
        self._spans: list[tuple[float, float, float]] = []
        self._bytes_an_iteration = 0

    def step(self) -> float:
        """One iteration; returns its loss, the mean over the whole batch before the update, on every rank."""
        start = time.perf_counter()
        inputs, targets = batch(self.config, self.iteration) if self._reads_data else (None, None)
        self._optimizer.zero_grad()
        sent = self.pipeline.messages.bytes_sent
        loss = self.pipeline.run(inputs, targets, self.iteration).item()
        self._bytes_an_iteration = self.pipeline.messages.bytes_sent - sent
        step(self.config, self._optimizer, self.iteration, self._norm() if self._norm else None)
        self.iteration += 1
        events = self.pipeline.executor.events
        busy = sum(event.end - event.start for event in events)
        self._spans.append((events[0].start, events[-1].end, busy))
        self.losses.append(loss)
        self.iteration_seconds.append(time.perf_counter() - start)
        return loss

    def train(self, *, show: bool = False) -> None:
        """All iterations of the config; rank 0 shows the progress."""
        with Progress(self.config.num_iterations, show and self.world.rank == 0) as progress:
            while self.iteration < self.config.num_iterations:
                progress.advance(self.step())

    def evaluate(self) -> dict[str, float] | None:
        """`accuracy` and `loss` on the test rows, on every rank; None for random data."""
        if not self.has_test:
            return None
        inputs, targets = test_set(self.config) if self._reads_data else (None, None)
        return self.pipeline.evaluate(inputs, targets)

    @property
    def is_emulated(self) -> bool:
        """Whether actions are stretched."""
        return self._emulate is not None

    @property
    def cost_unit(self) -> str:
        """The unit of `predicted_cost`."""
        return "ms" if self._emulate else "slots"

    def result(self) -> Result | None:
        """The run's result on rank 0, None elsewhere."""
        test = self.evaluate()
        parameters = gather_parameters(self.world, self.pipeline.stages, self.table.rank_of_stage)
        peaks = self.world.gather(self.pipeline.executor.peak_in_flight)
        sent = self.world.gather(self._bytes_an_iteration)
        spans = self.world.gather(self._spans)
        if self.world.rank != 0:
            return None
        return Result(
            schedule=self.table.name,
            num_ranks=self.world.size,
            num_stages=self.table.num_stages,
            num_microbatches=self.config.num_microbatches,
            losses=self.losses,
            iteration_seconds=self.iteration_seconds,
            test_accuracy=test["accuracy"] if test else None,
            weights_sha256=weights_sha256(parameters),
            bubble={"predicted": bubble(self.table, self.predicted_cost), "measured": measured_bubble(spans)},
            peak_in_flight=peaks,
            bytes_sent=sent,
        )

    def timeline(self) -> list[list[Event]] | None:
        """On rank 0 the events of each rank in one typical iteration of the last few: the one of median length."""
        kept = self.world.gather(list(self.pipeline.executor.kept_events))
        if kept is None:
            return None
        iterations = list(zip(*kept, strict=True))
        lengths = [max(e[-1].end for e in ranks) - min(e[0].start for e in ranks) for ranks in iterations]
        middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
        return list(iterations[middle])

    def close(self) -> None:
        """Ends the pipeline's messages."""
        self.pipeline.close()


def measured_bubble(spans: Sequence[Sequence[tuple[float, float, float]]]) -> float:
    """1 - time inside actions / (ranks x wall time of the actions), the median over iterations.

    spans: for each rank and iteration the first start, the last end (of clocks that agree, as on one host), and the
    seconds inside actions. The first iterations, which warm up, are left out where there are others. Waiting for a
    message and sending count as bubble; the optimizer's step lies outside.
    """
    iterations = list(zip(*spans, strict=True))
    shares = []
    for ranks in iterations[WARM_UP_ITERATIONS:] or iterations:
        wall = max(end for _, end, _ in ranks) - min(start for start, _, _ in ranks)
        shares.append(1 - sum(busy for _, _, busy in ranks) / (len(ranks) * wall))
    return statistics.median(shares)
