"""Lowering: adding the sends and receives to a table."""

from collections.abc import Sequence
from typing import NamedTuple

from step5_orchestrator.actions import Action, Value, makes, taker
from step5_orchestrator.collector import paused_collector
from step5_orchestrator.prediction import timing
from step5_orchestrator.table import Table


class Send(NamedTuple):
    """Hands a value over to another rank."""

    value: Value
    peer: int


class Receive(NamedTuple):
    """Posts the receive of a value that another rank makes."""

    value: Value
    peer: int


Instruction = Action | Send | Receive


@paused_collector()
def lower(table: Table) -> list[list[Instruction]]:
    """Each rank's row with its messages.

    Both ends of a message are placed at one point of one global order of the actions, right after the action that
    makes the value. So all ranks see all messages in the same order: whatever a rank waits for lies earlier in that
    order, and even messages that block until they are taken come to an end; and a pair's messages are received in the
    order in which they are sent, which is all that NCCL goes by.
    """
    rank_of, num_stages = table.rank_of_stage, table.num_stages
    lowered: list[list[Instruction]] = [[] for _ in table.rows]
    times = timing(table)
    # sorted() keeps the table's order among equal starts.
    for action in sorted(times, key=lambda a: times[a][0]):
        rank = rank_of[action.stage]
        lowered[rank].append(action)
        for value in makes(action):
            stage = taker(value)
            if 0 <= stage < num_stages and rank_of[stage] != rank:
                lowered[rank].append(Send(value, rank_of[stage]))
                lowered[rank_of[stage]].append(Receive(value, rank))
    return lowered


def post_ahead(row: Sequence[Instruction]) -> list[Instruction]:
    """The same row with each receive posted one action earlier, where posting does not wait.

    A message begins to travel when both ends have posted it, so that a receiver that is computing at that moment would
    hold it up. The order within each edge stays.
    """
    early: list[Instruction] = []
    latest = None
    for instruction in row:
        if isinstance(instruction, Receive) and latest is not None:
            early.insert(latest, instruction)
            latest += 1
        else:
            if isinstance(instruction, Action):
                latest = len(early)
            early.append(instruction)
    return early
