"""Training with a pipeline: data in at the first stage, loss out at the last, one optimizer step an iteration."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from step0_monolith.config import NUM_FEATURES, NUM_TEST_ROWS, Config
from step0_monolith.data import batch, microbatch_sizes, test_set
from step0_monolith.progress import Progress
from step0_monolith.result import Result, weights_sha256
from step0_monolith.resume import History
from step0_monolith.update import learning_rate, left_out, make_optimizer
from step1_partition.stage import Stage
from step2_comms.world import World
from step3_pingpong.clocks import Clock, Reading, compare_clocks
from step4_sharded.shard import shard
from step5_orchestrator.checkpoint import Checkpoints
from step5_orchestrator.costs import UNIT_COST, Cost
from step5_orchestrator.executor import KEPT_ITERATIONS, Event
from step5_orchestrator.gather import gather_parameters
from step5_orchestrator.optimizer import PipelineParallelOptimizer
from step5_orchestrator.pipeline import Pipeline
from step5_orchestrator.prediction import bubble
from step5_orchestrator.replicas import Replicas
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
        data_parallel: int = 1,
    ) -> None:
        """Builds this rank's stages, opens the pipeline and agrees on all messages of training and evaluation.

        emulate: milliseconds that actions and messages take at least. cost: what the prediction takes them to cost when
        they are not emulated. stage_class: of the stages; a table that splits the backward needs one that can.
        data_parallel: replicas of the pipeline; the table is one replica's.
        """
        self.config, self.world, self.table, self._emulate = config, world, table, emulate
        self.predicted_cost = emulate or cost
        self.replicas = Replicas(world, data_parallel) if data_parallel > 1 else None
        within = world if self.replicas is None else self.replicas.pipeline
        stages = {
            index: shard(config, table.num_stages, index, layers_per_stage, world.device, stage_class)
            for index in table.stages_of(within.rank)
        }
        self.pipeline = Pipeline(within, stages, table, seed=config.seed, emulate=emulate)
        self._piece = (0, 1) if self.replicas is None else (self.replicas.index, data_parallel)
        rows = microbatch_sizes(config.batch_size, data_parallel)[self._piece[0]]
        self.pipeline.open("train", (rows, NUM_FEATURES), config.torch_dtype)
        self.has_test = config.data == "digits"
        if self.has_test:
            self.pipeline.open("evaluate", (NUM_TEST_ROWS, NUM_FEATURES), config.torch_dtype)
        self.optimizer = PipelineParallelOptimizer(
            make_optimizer(config, self.pipeline.parameters()),
            self.pipeline,
            config.num_microbatches,
            config.max_grad_norm,
            accumulate=config.accumulate,
            on_nonfinite=config.on_nonfinite,
            lr_schedule=partial(learning_rate, config),
            replicas=self.replicas,
        )
        self._reads_data = self.pipeline.is_first or self.pipeline.is_last
        self.history = History()
        # For each iteration: first start, last end, and seconds inside actions, on this rank.
        self._spans: list[tuple[float, float, float]] = []
        self._bytes_an_iteration = 0
        # Number, start and end of the last iterations, as long as the executor keeps their events.
        self.kept_iterations: deque[tuple[int, float, float]] = deque(maxlen=KEPT_ITERATIONS)
        self._clocks_before: Reading | None = None

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.optimizer.iterations

    @property
    def losses(self) -> list[float]:
        """The loss of each iteration so far."""
        return self.history.losses

    @property
    def iteration_seconds(self) -> list[float]:
        """The seconds of each iteration so far, on this rank."""
        return self.history.iteration_seconds

    def step(self) -> float:
        """One iteration; returns its loss, the mean over the whole batch before the update, on every rank."""
        start = time.perf_counter()
        rows = batch(self.config, self.iteration, *self._piece) if self._reads_data else (None, None)
        sent = self.pipeline.messages.bytes_sent
        weight = self.config.batch_size * self.config.accumulate
        loss = self.optimizer.optimize(rows, weight=weight).item()
        self._bytes_an_iteration = self.pipeline.messages.bytes_sent - sent
        events = self.pipeline.executor.events
        busy = sum(event.end - event.start for event in events)
        self._spans.append((events[0].start, events[-1].end, busy))
        end = time.perf_counter()
        self.losses.append(loss)
        self.iteration_seconds.append(end - start)
        self.kept_iterations.append((self.iteration, start, end))
        return loss

    def train(self, *, show: bool = False, checkpoints: Checkpoints | None = None) -> None:
        """All iterations of the config that are not done yet; rank 0 shows the progress.

        Starts by making sure that all ranks train alike (see `synchronize_optimizer_state`), unless it goes on between
        two updates.
        """
        self._clocks_before = compare_clocks(self.world)
        if self.iteration % self.config.accumulate == 0:
            self.optimizer.synchronize_optimizer_state()
        with Progress(self.config.num_iterations, show and self.world.rank == 0, self.iteration) as progress:
            while self.iteration < self.config.num_iterations:
                progress.advance(self.step())
                if checkpoints is not None:
                    checkpoints.after_iteration(self)
        if checkpoints is not None:
            checkpoints.finish(self.world)

    def left_out(self) -> str | None:
        """What to say about updates that were left out, if any was."""
        return left_out(self.iteration, self.config.accumulate, self.optimizer.updates, self.optimizer.first_wrong)

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

    def clock(self) -> Clock:
        """This rank's clock against rank 0's, compared when training began and now; called on every rank."""
        now = compare_clocks(self.world)
        return Clock(self._clocks_before or now, now)

    def result(self) -> Result | None:
        """The run's result on rank 0, None elsewhere."""
        test = self.evaluate()
        parameters = gather_parameters(self.pipeline.world, self.pipeline.stages, self.table.rank_of_stage)
        peaks = self.world.gather(self.pipeline.executor.peak_in_flight)
        sent = self.world.gather(self._bytes_an_iteration)
        aligned = self.clock().aligned
        spans = self.world.gather([(aligned(start), aligned(end), busy) for start, end, busy in self._spans])
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
        """On rank 0 the events of each rank of its pipeline in one typical iteration of the last few: the one of median
        length. None elsewhere, and when no iteration was run.
        """
        aligned = self.clock().aligned
        own = [
            [Event(action, aligned(start), aligned(end)) for action, start, end in events]
            for events in self.pipeline.executor.kept_events
        ]
        kept = self.pipeline.world.gather(own)
        if self.world.rank != 0 or not kept[0]:
            return None
        iterations = list(zip(*kept, strict=True))
        lengths = [max(e[-1].end for e in ranks) - min(e[0].start for e in ranks) for ranks in iterations]
        middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
        return list(iterations[middle])

    def close(self) -> None:
        """Ends the pipeline's messages."""
        self.pipeline.close()


def measured_bubble(spans: Sequence[Sequence[tuple[float, float, float]]]) -> float | None:
    """1 - time inside actions / (ranks x wall time of the actions), the median over iterations.

    spans: for each rank and iteration the first start, the last end (of clocks that agree), and the seconds inside
    actions. The first iterations, which warm up, are left out where there are others. Waiting for a
    message and sending count as bubble; the optimizer's step lies outside. None without any iteration.
    """
    iterations = list(zip(*spans, strict=True))
    if not iterations:
        return None
    shares = []
    for ranks in iterations[WARM_UP_ITERATIONS:] or iterations:
        wall = max(end for _, end, _ in ranks) - min(start for start, _, _ in ranks)
        shares.append(1 - sum(busy for _, _, busy in ranks) / (len(ranks) * wall))
    return statistics.median(shares)
