"""From what each rank says it is doing to the rank that holds up all the others."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Note:
    """What one rank was doing when somebody asked.

    state: "waits" (in `call`, for rank `peer`; peer None: for all ranks), "busy" (in `call`), "failed" (with `error`),
    "left" (exited before its work was done), "finished", or "silent" (did not answer; another rank wrote this note).
    where: file and line. seconds: how long in this state. gave_up: it waits no longer, its message has failed.
    """

    rank: int
    state: str
    call: str = ""
    peer: int | None = None
    where: str = ""
    seconds: float = 0.0
    error: str = ""
    gave_up: bool = False

    @property
    def is_last(self) -> bool:
        """Whether the rank will send nothing more."""
        return self.gave_up or self.state in ("failed", "left", "finished", "silent")

    def to_json(self) -> str:
        """The note as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Note":
        """The note that `to_json` wrote."""
        return cls(**json.loads(text))

    def sentence(self) -> str:
        """For example: rank 1 waits in send_backward to rank 0 (gradient of 1B3)."""
        if self.state == "waits":
            return f"rank {self.rank} waits in {self.call}"
        if self.state == "busy":
            return f"rank {self.rank} is alive but has been {self.activity()}"
        if self.state == "failed":
            return f"rank {self.rank} failed: {self.error}"
        if self.state == "finished":
            return f"rank {self.rank} has finished"
        if self.state == "silent":
            return f"rank {self.rank} does not answer: killed, stopped or gone"
        return f"rank {self.rank} left before its work was done{self._place()}"

    def activity(self) -> str:
        """For example: busy for 61 s while in 2F3 at executor.py:140."""
        return f"busy for {self.seconds:.0f} s{self._place()}"

    def _place(self) -> str:
        doing = f" while in {self.call}" if self.call else ""
        return doing + (f" at {self.where}" if self.where else "")


# Who holds up a rank that waits for all: first those who never come, then those who are on their way.
_HOLDS_UP = ("failed", "left", "silent", "waits", "busy", "finished")


def _waited_for(note: Note, notes: Mapping[int, Note], num_ranks: int) -> int | None:
    """The rank that `note` waits for; None when it waits for nobody, or for all, who all wait in the same call."""
    if note.state != "waits":
        return None
    if note.peer is not None:
        return note.peer
    others = [notes.get(rank, Note(rank, "silent")) for rank in range(num_ranks) if rank != note.rank]
    elsewhere = [other for other in others if (other.state, other.call, other.peer) != ("waits", note.call, None)]
    return min(elsewhere, key=lambda other: _HOLDS_UP.index(other.state)).rank if elsewhere else None


def chain(notes: Mapping[int, Note], start: int, num_ranks: int) -> list[int]:
    """The ranks from `start` along their waits: each waits for the next.

    The last one waits for nobody, or has no note, or is in the list twice: then the ranks from its first place on wait
    in a circle.
    """
    found = [start]
    while found[-1] in notes and found[-1] not in found[:-1]:
        following = _waited_for(notes[found[-1]], notes, num_ranks)
        if following is None:
            break
        found.append(following)
    return found


def explain(notes: Mapping[int, Note], start: int, num_ranks: int) -> str:
    """Follows the waits from rank `start` to the rank that waits for nobody, or round a circle, and says it in a line.

    A rank without a note did not answer: it was killed, stopped, or ended without a word.
    """
    *before, root = chain(notes, start, num_ranks)
    if root in before:
        circle = before[before.index(root) :]
        first = circle.index(min(circle))
        circle = circle[first:] + circle[:first]  # so that every rank of the circle says the same sentence
        before = before[: before.index(root)]
        verdict = "deadlock: " + ", ".join(notes[rank].sentence() for rank in circle)
    else:
        note = notes.get(root, Note(root, "silent"))
        verdict = f"all ranks wait in {note.call}" if note.state == "waits" else note.sentence()
        if note.state == "silent":
            # A launcher ends all ranks when one has failed, so that a rank that failed by itself comes first.
            failed = [n.sentence() for n in notes.values() if n.state in ("failed", "left") and n.rank not in before]
            verdict = "; ".join([*failed, verdict])
    return "; ".join([verdict, *(notes[rank].sentence() for rank in before)])
