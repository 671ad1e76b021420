"""Lowering: adding the sends and receives to a table."""

from collections.abc import Sequence
from typing import NamedTuple

from step5_orchestrator.actions import Action, Value, makes, needs
from step5_orchestrator.table import Table, timing


class Send(NamedTuple):
    """Hands a value over to another rank."""

    value: Value
    peer: int


class Receive(NamedTuple):
    """Posts the receive of a value that another rank makes."""

    value: Value
    peer: int


Instruction = Action | Send | Receive


def lower(table: Table) -> list[list[Instruction]]:
    """Each rank's row with its messages.

    Both ends of a message are placed at one point of one global order of the actions, right after the action that
    makes the value. So all ranks see all messages in the same order: whatever a rank waits for lies earlier in that
    order, and even messages that block until they are taken come to an end; and a pair's messages are received in the
    order in which they are sent, which is all that NCCL goes by.
    """
    consumer = {value: rank for rank, row in enumerate(table.rows) for action in row for value in needs(action)}
    rank_of = table.rank_of_stage
    lowered: list[list[Instruction]] = [[] for _ in table.rows]
    times = timing(table)
    order = {action: place for place, action in enumerate(times)}
    for action in sorted(times, key=lambda a: (times[a][0], order[a])):
        rank = rank_of[action.stage]
        lowered[rank].append(action)
        for value in makes(action):
            peer = consumer.get(value, rank)
            if peer != rank:
                lowered[rank].append(Send(value, peer))
                lowered[peer].append(Receive(value, rank))
    return lowered


def post_ahead(row: Sequence[Instruction]) -> list[Instruction]:
    """The same row with each receive posted one action earlier, where posting does not wait.

    A message begins to travel when both ends have posted it, so that a receiver that is computing at that moment would
    hold it up. The order within each edge stays.
    """
    early: list[Instruction] = []
    for instruction in row:
        if isinstance(instruction, Receive):
            place = next((i for i in range(len(early) - 1, -1, -1) if isinstance(early[i], Action)), len(early))
            early.insert(place, instruction)
        else:
            early.append(instruction)
    return early
