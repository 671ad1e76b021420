"""The strictest messages that there can be: unbuffered, and both ends blocked until they meet."""

from collections.abc import Sequence

from step5_orchestrator.actions import Action
from step5_orchestrator.lowering import Instruction, Receive, Send


def run_with_blocking_messages(
    lowered: Sequence[Sequence[Instruction]],
) -> tuple[list[Action], list[Sequence[Instruction]]]:
    """Runs a lowered table until nothing moves, each rank in posting order.

    Returns the actions that ran, in an order in which they did, and what each rank has left.
    """
    position = [0] * len(lowered)
    done = []
    while True:
        moved = False
        for rank, row in enumerate(lowered):
            if position[rank] == len(row):
                continue
            instruction = row[position[rank]]
            if isinstance(instruction, Action):
                done.append(instruction)
                position[rank] += 1
                moved = True
            elif isinstance(instruction, Send):
                peer = instruction.peer
                theirs = lowered[peer][position[peer]] if position[peer] < len(lowered[peer]) else None
                if theirs == Receive(instruction.value, rank):
                    position[rank] += 1
                    position[peer] += 1
                    moved = True
        if not moved:
            return done, [row[place:] for row, place in zip(lowered, position, strict=True)]
