"""What one cell of a spreadsheet says, and where it lies."""

import re
from typing import NamedTuple

from step5_orchestrator.actions import Action, parse_action
from step5_orchestrator.csv_file import INNER
from step5_orchestrator.table import PAIR

_COMMUNICATION = "SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD"
_EXAMPLE = f"(2F4;5B1){PAIR}"


class Place(NamedTuple):
    """Row and column of a cell, from 0; as text both from 1, and as spreadsheet programs say it."""

    row: int
    column: int

    @property
    def name(self) -> str:
        """Such as C2: the column in letters, A to Z, then AA; then the row."""
        letters, number = "", self.column + 1
        while number:
            number, letter = divmod(number - 1, 26)
            letters = chr(ord("A") + letter) + letters
        return f"{letters}{self.row + 1}"

    def __str__(self) -> str:
        return f"{self.name} (row {self.row + 1}, column {self.column + 1})"


def read_cell(text: str) -> tuple[Action, ...]:
    """The actions of a cell: none of a blank one, two of a pair.

    Raises ValueError that says what is wrong with anything else, and what to do.
    """
    text = text.strip()
    if not text:
        return ()
    if text[0] == "(":
        return _read_pair(text)
    try:
        return (parse_action(text),)
    except ValueError:
        raise ValueError(_why_not(text)) from None


def shown(text: str) -> str:
    """The text of a cell for a message: quoted, on one line, and not too long."""
    text = text.strip().replace(INNER, ";")
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _read_pair(text: str) -> tuple[Action, Action]:
    match = re.fullmatch(rf"\(([^()]*)\)\s*{PAIR}", text)
    parts = [part.strip() for part in match[1].split(INNER)] if match else []
    if len(parts) != 2:
        raise ValueError(f"a pair is two actions, written as {_EXAMPLE}")
    actions = []
    for part in parts:
        try:
            actions.append(parse_action(part))
        except ValueError:
            raise ValueError(f"in the pair, {shown(part)}: {_why_not(part)}") from None
    first, second = actions
    if first.op != "F" or second.op not in ("B", "I"):
        raise ValueError(f"a pair is a forward and then a backward (B or I), such as {_EXAMPLE}")
    return first, second


def _why_not(text: str) -> str:
    if found := re.fullmatch(rf"[0-9]*({_COMMUNICATION})[0-9]*", text):
        return (
            f"{found[1]} is communication, which lowering adds; export the compute-only table, or leave the cell blank"
        )
    if re.search(r"[0-9]{10}", text):
        return "no stage or microbatch has more than 9 digits; correct the number"
    if len(re.findall(r"[0-9]+[FBIW][0-9]+", text)) > 1:
        return f"a cell is one action, or a pair such as {_EXAMPLE}; give each action a cell of its own"
    if re.fullmatch(r"[0-9]+[fbiw][0-9]+", text):
        return f"ops are capital letters; write {text.upper()}"
    if re.fullmatch(r"[0-9]+[FBIW]", text):
        return f"the microbatch is missing; write it last, as in {text}0"
    if re.fullmatch(r"[FBIW][0-9]+", text):
        return f"the stage is missing; write it first, as in 0{text}"
    if found := re.fullmatch(r"[0-9]+([A-Za-z_]+)[0-9]*", text):
        return f"the op {shown(found[1])} is unknown; write one of F, B, I and W"
    return (
        "this is no action; write stage, op (F, B, I or W) and microbatch, such as 2F0, or leave the cell blank; leave "
        "out headings and the ranks' labels"
    )
