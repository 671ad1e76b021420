"""A run's trace: actions, messages and memory of all ranks as they were, brought to one clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from step5_orchestrator.actions import Value
from step5_orchestrator.executor import Event
from step5_orchestrator.recording import Transfer
from step5_orchestrator.table import Table
from step5_orchestrator.trainer import Trainer
from step6_schedules.narrow import narrowed
from step6_schedules.probe import Probe

MAX_ACTIONS = 60_000  # in a trace; there are up to twice as many messages and counters beside them


class Iteration(NamedTuple):
    """One iteration on one rank. number: from 1, as the progress shows it."""

    number: int
    start: float
    end: float
    events: list[Event]
    transfers: list[Transfer]

    def moved(self, move) -> "Iteration":
        """The same with all times changed by `move`."""
        events = [Event(e.action, move(e.start), move(e.end)) for e in self.events]
        transfers = [t._replace(start=move(t.start), end=move(t.end)) for t in self.transfers]
        return Iteration(self.number, move(self.start), move(self.end), events, transfers)


@dataclass
class RankRecord:
    """What one rank of the world recorded.

    replica, rank: its pipeline, and its place there. peers: for each rank of its pipeline the rank in the world.
    clock_error: seconds that its times may be off rank 0's. stage_bytes: for each of its stages and each microbatch the
    bytes of activations that a forward leaves for the backward. message_bytes: of each value that it sent or received.
    """

    replica: int
    rank: int
    peers: tuple[int, ...]
    clock_error: float
    stage_bytes: dict[int, list[int]]
    message_bytes: dict[Value, int]
    iterations: list[Iteration]


@dataclass
class Trace:
    """A run as it was. ranks: in the world's order, all in rank 0's time, but for clock_error seconds at most.
    clock_note: the same in words.
    """

    table: Table
    ranks: list[RankRecord]
    clock_error: float
    clock_note: str


class Tracing:
    """Records a trainer's iterations from here on; made on every rank, before it trains."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer.pipeline.executor.record()
        self._probes = {index: Probe(stage, trainer.config.num_microbatches)
                        for index, stage in trainer.pipeline.stages.items()}  # fmt: skip

    def trace(self) -> Trace | None:
        """The last iterations, on rank 0; None elsewhere, and when none was run. Called on every rank."""
        trainer, executor = self._trainer, self._trainer.pipeline.executor
        clock = trainer.clock()
        kept = zip(trainer.kept_iterations, executor.kept_events, executor.recording.kept, strict=True)
        iterations = [Iteration(*span, events, transfers) for span, events, transfers in kept]
        pipeline = trainer.pipeline.world
        actions = len(trainer.table.order) * (trainer.world.size // pipeline.size)
        shown = iterations[-max(1, MAX_ACTIONS // actions) :]
        values = {transfer.value for iteration in shown for transfer in iteration.transfers}
        own = RankRecord(
            0 if trainer.replicas is None else trainer.replicas.index,
            pipeline.rank,
            pipeline.ranks,
            clock.error,
            {index: probe.num_bytes for index, probe in self._probes.items()},
            {value: executor.bytes_of(value) for value in values},
            [iteration.moved(clock.aligned) for iteration in shown],
        )
        records = trainer.world.gather(own)
        return None if records is None or not shown else together(trainer.table, records)


def together(table: Table, records: Sequence[RankRecord]) -> Trace:
    """The trace whose clocks agree as well as comparison and messages allow."""
    leads: dict[tuple[int, int], float] = {}
    for source, destination, send, receive in messages(records):
        lead = receive.end - send.start
        leads[source, destination] = min(lead, leads.get((source, destination), lead))
    errors = [record.clock_error for record in records]
    corrections, left, widening = narrowed(errors, leads)
    for record, correction in zip(records, corrections, strict=True):
        record.iterations = [i.moved(lambda t, by=correction: t + by) for i in record.iterations]
    worst = max(left)
    how = "all ranks read one clock" if worst == 0 else f"clocks differ from rank 0's by at most {worst * 1e6:.1f} us"
    if widening:
        how += f" (the comparison had found less; the messages ask for {widening * 1e6:.1f} us more)"
    return Trace(table, list(records), worst, how)


def messages(records: Sequence[RankRecord]) -> list[tuple[int, int, Transfer, Transfer]]:
    """All messages whose two ends were recorded: source, destination, send, receive; ranks are the world's."""
    ends: dict[tuple, Transfer] = {}
    for rank, record in enumerate(records):
        for iteration in record.iterations:
            for transfer in iteration.transfers:
                if not transfer.is_send:
                    ends[iteration.number, transfer.value, record.peers[transfer.peer], rank] = transfer
    found = []
    for rank, record in enumerate(records):
        for iteration in record.iterations:
            for transfer in iteration.transfers:
                peer = record.peers[transfer.peer]
                receive = ends.get((iteration.number, transfer.value, rank, peer)) if transfer.is_send else None
                if receive is not None:
                    found.append((rank, peer, transfer, receive))
    return found
