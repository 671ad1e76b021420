"""From what each rank says it is doing to the rank that holds up all the others."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Note:
    """What one rank was doing when somebody asked.

    state: "waits" (in `call`, for rank `peer`; peer None: for all ranks), "busy" (in `call`), "failed" (with `error`),
    "left" (exited before its work was done) or "finished". where: file and line. seconds: how long in this state.
    """

    rank: int
    state: str
    call: str = ""
    peer: int | None = None
    where: str = ""
    seconds: float = 0.0
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Note":
        return cls(**json.loads(text))

    def sentence(self) -> str:
        """For example: rank 1 waits in send_backward to rank 0 (gradient of 1B3)."""
        if self.state == "waits":
            return f"rank {self.rank} waits in {self.call}"
        if self.state == "failed":
            return f"rank {self.rank} failed: {self.error}"
        if self.state == "finished":
            return f"rank {self.rank} has finished"
        doing = f" while in {self.call}" if self.call else ""
        at = f" at {self.where}" if self.where else ""
        if self.state == "left":
            return f"rank {self.rank} left before its work was done{doing}"
        return f"rank {self.rank} is alive but has been busy for {self.seconds:.0f} s{doing}{at}"


def _waited_for(note: Note, notes: Mapping[int, Note], num_ranks: int) -> int | None:
    """The rank that `note` waits for. Of all ranks: one that gave no answer, else one that does not wait for all."""
    if note.state != "waits":
        return None
    if note.peer is not None:
        return note.peer
    others = [rank for rank in range(num_ranks) if rank != note.rank]
    silent = [rank for rank in others if rank not in notes]
    elsewhere = [rank for rank in others if rank in notes and notes[rank].peer is not None]
    gone = [rank for rank in others if rank in notes and notes[rank].state != "waits"]
    return next(iter(gone + silent + elsewhere), None)


def explain(notes: Mapping[int, Note], start: int, num_ranks: int) -> str:
    """Follows the waits from rank `start` to the rank that waits for nobody, or round a cycle, and says it in a line.

    A rank without a note did not answer: it was killed, stopped, or ended without a word.
    """
    chain = [start]
    while True:
        following = _waited_for(notes[chain[-1]], notes, num_ranks)
        if following is None:
            break
        if following in chain:
            cycle = chain[chain.index(following) :]
            first = cycle.index(min(cycle))  # every rank of the cycle says the same sentence
            return "deadlock: " + ", ".join(notes[rank].sentence() for rank in cycle[first:] + cycle[:first])
        chain.append(following)
        if following not in notes:
            break
    root = chain[-1]
    waits = ", ".join(notes[rank].sentence() for rank in chain if rank in notes and rank != root)
    verdict = notes[root].sentence() if root in notes else f"rank {root} does not answer: killed, stopped or gone"
    return f"{verdict}; {waits}" if waits else verdict
