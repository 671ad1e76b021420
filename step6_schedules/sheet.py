"""A schedule drawn on squared paper: a line a rank, a column a slot, an action a cell; every mistake with a reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from step0_monolith.options import UsageError
from step5_orchestrator.actions import Action, Value, is_given, makes, needs
from step5_orchestrator.cells import read_cell, shown
from step5_orchestrator.costs import costs
from step5_orchestrator.csv_file import INNER, records
from step5_orchestrator.table import Table, make_table

SLOT = costs(1.0, 1.0)  # on squared paper a forward and a backward take a cell each
OPS = ("F", "B")
WHAT = {"saved": "what is saved by", "activation": "the activation of", "gradient": "the gradient of"}
CORNER = "slot"
MAX_SLOTS_SHOWN = 128
MAX_CELL = 12  # characters in the grid


class Fault(NamedTuple):
    """What is wrong with one cell."""

    rank: int
    slot: int
    text: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}, slot {self.slot}: {self.text} {self.reason}"


@dataclass(frozen=True)
class Sheet:
    """The cells of each rank, slot by slot; '' where it is idle. One stage a rank, stage r on rank r.

    name: of the table that the cells make.
    """

    cells: tuple[tuple[str, ...], ...]
    num_microbatches: int
    name: str = "sheet"

    @property
    def num_ranks(self) -> int:
        """Lines."""
        return len(self.cells)

    @cached_property
    def _read(self) -> tuple[dict[Action, tuple[int, int]], dict[tuple[int, int], str]]:
        """Where each action stands first on its own rank, and what is wrong with cells whatever the others hold."""
        places: dict[Action, tuple[int, int]] = {}
        wrong: dict[tuple[int, int], str] = {}
        for rank, row in enumerate(self.cells):
            for slot, text in enumerate(row):
                if not text.strip():
                    continue
                try:
                    actions = read_cell(text)
                except ValueError as error:
                    wrong[rank, slot] = f"cannot be read: {error}"
                    continue
                reason = self._alone(actions, rank, places)
                if reason:
                    wrong[rank, slot] = reason
                else:
                    places[actions[0]] = (rank, slot)
        return places, wrong

    def _alone(self, actions: Sequence[Action], rank: int, places: dict[Action, tuple[int, int]]) -> str:
        if len(actions) > 1:
            return "is a pair, and a slot has room for one action"
        (action,) = actions
        if action.op not in OPS:
            return f"is no forward and no backward: here the ops are {' and '.join(OPS)}"
        if action.stage >= self.num_ranks:
            return f"has no stage: the stages are 0 to {self.num_ranks - 1}"
        if action.stage != rank:
            return f"belongs to rank {action.stage}, which holds stage {action.stage}"
        if action.microbatch >= self.num_microbatches:
            return f"has no microbatch: they are 0 to {self.num_microbatches - 1}"
        if action in places:
            return f"has run already, in slot {places[action][1]}"
        return ""

    @cached_property
    def faults(self) -> list[Fault]:
        """Every cell that is wrong, rank by rank. A cell that waits for one that is wrong itself is not named too."""
        places, wrong = self._read
        # What a wrong cell was meant to be is there in some way: whoever needs it is not the one to mend.
        meant = {action for (rank, slot) in wrong for action in self._actions(rank, slot)}
        reasons = dict(wrong)
        for action, (rank, slot) in places.items():
            reason = next(filter(None, (self._in_time(value, slot, places, meant) for value in needs(action))), None)
            if reason:
                reasons[rank, slot] = reason
        return [Fault(r, s, shown_cell(self.cells[r][s]), why) for (r, s), why in sorted(reasons.items())]

    def _actions(self, rank: int, slot: int) -> Sequence[Action]:
        try:
            return read_cell(self.cells[rank][slot])
        except ValueError:
            return ()

    def _in_time(
        self, value: Value, slot: int, places: dict[Action, tuple[int, int]], meant: set[Action]
    ) -> str | None:
        """Why a value is not there when the slot begins."""
        if is_given(value, self.num_ranks):
            return None
        maker = next(action for action in self.wanted() if value in makes(action))
        what = {"saved": "what is saved by", "activation": "the activation of", "gradient": "the gradient of"}[
            value.kind
        ]
        if maker not in places:
            return None if maker in meant else f"needs {what} {maker}, which is nowhere"
        rank, made = places[maker]
        if made < slot:
            return None
        same = "the same slot" if made == slot else f"slot {made}"
        return f"needs {what} {maker}, which rank {rank} runs in {same}: it is there from slot {made + 1} on"

    def wanted(self) -> list[Action]:
        """Every action that must run, rank by rank."""
        return [
            Action(stage, op, m) for stage in range(self.num_ranks) for op in OPS for m in range(self.num_microbatches)
        ]

    @cached_property
    def missing(self) -> list[Action]:
        """The actions that no cell holds, in its place or in a wrong one."""
        places, wrong = self._read
        meant = {action for (rank, slot) in wrong for action in self._actions(rank, slot)}
        return [action for action in self.wanted() if action not in places and action not in meant]

    @property
    def is_legal(self) -> bool:
        """Whether nothing is wrong and nothing is missing."""
        return not self.faults and not self.missing

    def table(self) -> Table:
        """The table of a legal sheet."""
        rows = [[action for text in row for action in read_cell(text)] for row in self.cells]
        return make_table(self.name, rows)

    @cached_property
    def num_slots(self) -> int:
        """Slots from the first action to the last."""
        used = [slot for row in self.cells for slot, text in enumerate(row) if text.strip()]
        return max(used) - min(used) + 1 if used else 0


def shown_text(text: str) -> str:
    """A cell's text as the file has it, cut where it is long."""
    text = text.strip().replace(INNER, ";")
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 3] + "..."


def shown_cell(text: str) -> str:
    """A cell's text as it is, or quoted where it is no word."""
    text = text.strip()
    return text if text.isalnum() else shown(text)


def read_sheet(path: Path, num_microbatches: int | None = None) -> Sheet:
    """The sheet in a CSV file. A first line of slots and a first column of ranks, as `empty_sheet` writes them, may be
    XX
        Raises UsageError for a file that cannot be read or holds no line.
    """
    lines = [[cell.strip() for cell in line] for line in records(path)]
    while lines and not any(lines[-1]):
        lines.pop()
    num_slots = 0
    if lines and lines[0][:1] == [CORNER]:
        num_slots, lines = sum(map(bool, lines[0])) - 1, lines[1:]
    if not any(map(any, lines)):
        raise UsageError(f"{str(path)!r} holds nothing; with --empty a sheet to fill is written")
    if all(line[:1] == [f"rank {rank}"] for rank, line in enumerate(lines)):
        lines = [line[1:] for line in lines]
    if num_microbatches is None and num_slots and num_slots % (2 * len(lines)) == 0:
        num_microbatches = num_slots // (2 * len(lines))
    return sheet_of(lines, num_microbatches, path.name)


def sheet_of(lines: Sequence[Sequence[str]], num_microbatches: int | None = None, name: str = "sheet") -> Sheet:
    """A sheet of lists of cells; shorter lines are idle to the end.

    num_microbatches: None: those from 0 on that are named without a gap, so that one wrong number adds none.
    """
    width = max(map(len, lines))
    cells = tuple((*line, *[""] * (width - len(line))) for line in lines)
    if num_microbatches is None:
        named = {action.microbatch for action in Sheet(cells, 10**9)._read[0]}
        num_microbatches = max(1, next(m for m in range(len(named) + 1) if m not in named))
    return Sheet(cells, num_microbatches, name)


def empty_sheet(num_ranks: int, num_microbatches: int) -> list[list[str]]:
    """The lines of a sheet to fill: slots above, ranks at the left, and room for the slowest order there is."""
    num_slots = 2 * num_microbatches * num_ranks
    head = [CORNER, *map(str, range(num_slots))]
    return [head, *([f"rank {rank}", *[""] * num_slots] for rank in range(num_ranks))]


def draw_sheet(sheet: Sheet) -> str:
    """The cells as text, `>2F0<` around what is wrong; of a wide sheet only how wide it is."""
    wrong = {(fault.rank, fault.slot) for fault in sheet.faults}
    last = max((s for row in sheet.cells for s, text in enumerate(row) if text.strip()), default=-1)
    if last >= MAX_SLOTS_SHOWN:
        return f"(too wide to print: {last + 1} slots)"
    edge = " " if wrong else ""  # room for the marks
    shown_rows = [
        [f">{shown_text(text)}<" if (rank, slot) in wrong else f"{edge}{text.strip() or '.'} "
         for slot, text in enumerate(row[: last + 1])]
        for rank, row in enumerate(sheet.cells)
    ]  # fmt: skip
    width = max((len(cell) for row in shown_rows for cell in row), default=1)
    label = len(f"rank {sheet.num_ranks - 1}") + 1
    head = "slot".ljust(label) + "".join(f"{edge}{slot}".ljust(width) for slot in range(last + 1))
    lines = [f"rank {r}".ljust(label) + "".join(c.ljust(width) for c in row) for r, row in enumerate(shown_rows)]
    return "\n".join(line.rstrip() for line in (head, *lines))
