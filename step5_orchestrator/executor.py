"""Runs one rank's row of a lowered table."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from step0_monolith.model import Draw, Tensors
from step1_partition.stage import Stage
from step2_comms.channel import Handle
from step2_comms.contract import Message
from step2_comms.p2p import Edge, Messages
from step2_comms.world import World
from step4_sharded.boundaries import Specs
from step5_orchestrator.actions import Action, Value, makes, needs
from step5_orchestrator.costs import Cost
from step5_orchestrator.emulate import sleep_out
from step5_orchestrator.lowering import Instruction, Receive, Send, post_ahead
from step5_orchestrator.recording import Recording
from step5_orchestrator.table import Table

KEPT_ITERATIONS = 25
# Bytes of receives that are posted ahead on an edge. Under NCCL a posted receive occupies the GPU, and none is needed:
# messages there need no answer from the program.
ROOM = {"gloo": 2**20, "nccl": 0}
HELD_BY_STAGE = ("saved", "kept")


class Event(NamedTuple):
    """One action as it ran, in seconds of this host's clock."""

    action: Action
    start: float
    end: float


def _edge(value: Value, source: int, destination: int) -> Edge:
    return ("forward" if value.kind == "activation" else "backward", source, destination)


def edges(lowered: Sequence[Sequence[Instruction]]) -> list[Edge]:
    """All edges that the messages of a lowered table use."""
    return [
        _edge(instruction.value, rank, instruction.peer)
        for rank, row in enumerate(lowered)
        for instruction in row
        if isinstance(instruction, Send)
    ]


def _num_bytes(boundaries: Mapping[int, Sequence[Specs]], value: Value) -> int:
    specs = boundaries[value.place][value.microbatch]
    return sum(
        math.prod(spec.shape) * spec.dtype.itemsize
        for spec in specs
        if spec.requires_grad or value.kind == "activation"
    )


class Executor:
    """One rank's part of a table, run again for each batch.

    It knows rows, values and stages, and the name of no schedule.
    """

    def __init__(
        self,
        name: str,
        world: World,
        stages: Mapping[int, Stage],
        table: Table,
        row: Sequence[Instruction],
        messages: Messages,
        *,
        emulate: Cost | None = None,
    ) -> None:
        """name: of the pass, "train" or "evaluate"; the latter keeps nothing for a backward. row: this rank's of the
        lowered table. emulate: in milliseconds.
        """
        self._name, self._world, self._stages, self._messages = name, world, stages, messages
        self._watch, self._room = world.watch, ROOM[world.backend]
        self._table, self._emulate = table, emulate
        self._lowered, self.row = row, list(row)
        self._values: dict[Value, Tensors | Handle | None] = {}
        self._sent: dict[Value, Handle] = {}  # what was sent and may be under way
        microbatches = range(table.num_microbatches)
        self._first, self._ends = ([Value("activation", b, m) for m in microbatches] for b in (0, table.num_stages))
        self._losses: Sequence[Callable[..., Tensor]] = ()
        self._iteration, self._seed, self._first_microbatch = 0, 0, 0
        self.peak_in_flight = 0
        self.events: list[Event] = []
        self.kept_events: deque[list[Event]] = deque(maxlen=KEPT_ITERATIONS)
        self.recording: Recording | None = None
        self.bytes_of: Callable[[Value], int] = lambda value: 0  # payload of a message; known once ranks have agreed

    def record(self) -> None:
        """From here on the messages' times are kept too, for as many iterations as the events."""
        self.recording, self._calls = Recording(KEPT_ITERATIONS), None
        self.kept_events.clear()

    @property
    def row(self) -> list[Instruction]:
        """What this rank runs, in its order."""
        return self._row

    @row.setter
    def row(self, row: Sequence[Instruction]) -> None:
        self._row, self._calls = list(row), None

    def agree(self, boundaries: Mapping[int, Sequence[Specs]]) -> None:
        """Tells each channel the messages of this pass, in the order of the row; called on every rank."""
        self.bytes_of = partial(_num_bytes, boundaries)
        self.row = post_ahead(self._lowered, self.bytes_of, self._room)
        scripts: dict[Edge, list[Message]] = {}
        rank = self._world.rank
        for instruction in self.row:
            if not isinstance(instruction, Send | Receive):
                continue
            value, peer = instruction
            edge = _edge(value, *((rank, peer) if isinstance(instruction, Send) else (peer, rank)))
            specs = boundaries[value.place][value.microbatch]
            if value.kind == "gradient":
                specs = tuple(spec._replace(requires_grad=False) for spec in specs if spec.requires_grad)
            scripts.setdefault(edge, []).append(Message(str(value), specs))
        for edge in sorted(scripts):
            self._messages.channel(*edge).agree(scripts[edge], self._name)

    def run(
        self,
        inputs: Sequence[Tensors] | None,
        losses: Sequence[Callable[..., Tensor]] | None,
        *,
        seed: int = 0,
        iteration: int = 0,
        first_microbatch: int = 0,
    ) -> list[Tensors]:
        """Runs the row once.

        inputs: what enters stage 0, for each microbatch; needed on its rank. losses: for each microbatch the function
        from the last stage's outputs to its share of the loss; needed on the last stage's rank to train. seed,
        iteration, first_microbatch: what dropout draws from. Returns on the last stage's rank the shares (or the
        outputs, to evaluate) in the order of the microbatches, elsewhere [].
        """
        self._values.clear()
        self._sent.clear()
        if inputs is not None:
            self._values.update(zip(self._first, inputs, strict=True))
        self._losses, self._iteration, self._seed = losses or (), iteration, seed
        self._first_microbatch = first_microbatch
        self.events = []
        self._messages.begin(self._name)
        if self._calls is None:
            self._calls = self._prepared_row()
        if self.recording is not None:
            self.recording.begin()
        for call in self._calls:
            call()
        self.kept_events.append(self.events)
        if self.recording is not None:
            self.recording.finish()
        outputs = [self._values[value] for value in self._ends if value in self._values]
        self._values.clear()
        return outputs

    def _prepared_row(self) -> list[Callable[[], None]]:
        received = {i.value: i.peer for i in self._row if isinstance(i, Receive)}
        sends = {i.value for i in self._row if isinstance(i, Send)}
        return [self._prepared(instruction, received, sends) for instruction in self._row]

    def _prepared(
        self, instruction: Instruction, received: Mapping[Value, int], sends: set[Value]
    ) -> Callable[[], None]:
        """An instruction as a call without arguments, with all that is the same in every batch looked up once."""
        messages = self._messages
        if isinstance(instruction, Send):
            value, peer = instruction
            send = messages.send_forward if value.kind == "activation" else messages.send_backward
            call = partial(self._send, value, partial(send, str(value), wait=False, peer=peer))
            return call if self.recording is None else partial(self.recording.send, value, peer, call)
        if isinstance(instruction, Receive):
            value, peer = instruction
            receive = messages.recv_forward if value.kind == "activation" else messages.recv_backward
            return partial(self._receive, value, partial(receive, str(value), wait=False, peer=peer))
        run = {"F": self._forward, "W": self._backward_weights}.get(instruction.op, self._backward)
        operand = next((value for value in needs(instruction) if value.kind not in HELD_BY_STAGE), None)
        act = partial(self._act, instruction, str(instruction), run, operand, makes(instruction))
        sent = Value("activation", instruction.stage + 1, instruction.microbatch)
        if instruction.op in ("B", "I") and sent in sends:
            act = partial(self._after_answer, act, sent)
        if self.recording is not None and operand in received:
            return partial(self.recording.take, operand, received[operand], self._values, act)
        return act

    def _send(self, value: Value, send: Callable[..., Handle]) -> None:
        self._sent[value] = send(self._values.pop(value))

    def _after_answer(self, act: Callable[[], None], sent: Value) -> None:
        """A backward whose stage sent its outputs: their gradient is the answer, so that they have long arrived."""
        act()
        # Until it is waited for, a message holds what it sent, and would hold it beyond this backward.
        self._sent.pop(sent).wait()

    def _receive(self, value: Value, receive: Callable[[], Handle]) -> None:
        self._values[value] = receive()

    def _act(
        self, action: Action, name: str, run: Callable[..., None], operand: Value | None, made: tuple[Value, ...]
    ) -> None:
        # None for the gradient of the loss, which nobody makes, and for W, whose stage has what it needs.
        taken = self._values.pop(operand, None)
        if isinstance(taken, Handle):
            taken = taken.wait()
        self._watch.busy(name)
        start = time.perf_counter()
        run(action, made, taken)
        if self._emulate is not None:
            sleep_out(start, self._emulate.of(action))
        self.events.append(Event(action, start, time.perf_counter()))

    def _forward(self, action: Action, made: tuple[Value, ...], inputs: Tensors) -> None:
        """Runs a stage forward on one microbatch and puts what it makes where the next action looks for it."""
        stage = self._stages[action.stage]
        # BEGIN SOLUTION step5.forward
        if self._name == "evaluate":
            self._values[made[0]] = stage.evaluate(inputs)
            return
        loss = self._losses[action.microbatch] if action.stage == self._table.num_stages - 1 else None
        draw = Draw(self._seed, self._iteration, self._first_microbatch + action.microbatch)
        outputs = stage.forward(action.microbatch, inputs, loss=loss, draw=draw)
        self._values[made[0]] = tuple([x.detach() for x in outputs]) if loss else outputs
        self.peak_in_flight = max(self.peak_in_flight, sum([s.in_flight for s in self._stages.values()]))
        # END SOLUTION

    def _backward(self, action: Action, made: tuple[Value, ...], gradients: Tensors | None) -> None:
        """Runs a stage backward on one microbatch, whole or for the input, and puts the gradient where it is looked
        for.
        """
        stage = self._stages[action.stage]
        # BEGIN SOLUTION step5.backward
        run = stage.backward if action.op == "B" else stage.backward_input
        self._values[made[0]] = run(action.microbatch, gradients)
        # END SOLUTION

    def _backward_weights(self, action: Action, made: tuple[Value, ...], taken: None) -> None:
        self._stages[action.stage].backward_weights(action.microbatch)
