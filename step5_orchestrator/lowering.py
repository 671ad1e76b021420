"""Lowering: adding the sends and receives to a table."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from step5_orchestrator.actions import Action, Value, makes, needs, taker
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


def post_ahead(
    row: Sequence[Instruction], bytes_of: Callable[[Value], int] | None = None, room: int = 0
) -> list[Instruction]:
    """The same row with each receive posted earlier, where posting does not wait: at least one action.

    A message begins to travel when both ends have posted it, so that a receiver that is computing at that moment would
    hold it up; and telling the sender that there is a place for it takes both ranks' time, which is cheaper where many
    are told at once. But each place is memory: room is how many bytes of a peer's messages of one kind may be posted
    and not yet taken by an action. The order within each edge stays.
    """
    early = _one_action_earlier(row)
    if bytes_of is None:
        return early
    coming: dict[tuple[str, int], deque[Receive]] = {}
    for instruction in early:
        if isinstance(instruction, Receive):
            coming.setdefault((instruction.value.kind, instruction.peer), deque()).append(instruction)
    left = dict.fromkeys(coming, room)
    posted: dict[Value, tuple[str, int]] = {}
    result: list[Instruction] = []

    def post(edge: tuple[str, int]) -> None:
        receive = coming[edge].popleft()
        left[edge] -= bytes_of(receive.value)
        posted[receive.value] = edge
        result.append(receive)

    def post_what_fits() -> None:
        for edge, receives in coming.items():
            while receives and bytes_of(receives[0].value) <= left[edge]:
                post(edge)

    post_what_fits()
    for instruction in early:
        if isinstance(instruction, Receive):
            if instruction.value not in posted:
                post((instruction.value.kind, instruction.peer))
            continue
        result.append(instruction)
        if isinstance(instruction, Action):
            for value in needs(instruction):
                if value in posted:
                    left[posted[value]] += bytes_of(value)
            post_what_fits()
    return result


def _one_action_earlier(row: Sequence[Instruction]) -> list[Instruction]:
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
