"""What a notebook's outputs say: cleaned of what differs from run to run, and compared."""

import base64
import re
import struct
from collections.abc import Sequence

from nbformat import NotebookNode

from notebooks.execute import outputs_of
from notebooks.walk import ROOT

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
HASH = re.compile(r"\b[0-9a-f]{64}\b")
WIDGET = "application/vnd.jupyter.widget-view+json"
KEPT = ("text/plain", "text/html", "text/markdown", "image/png", "image/svg+xml")
# One whole notebook has these, whoever ran it and wherever.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def clean(notebook: NotebookNode) -> None:
    """Takes out what differs from run to run and says nothing: times, ids, paths, colours, states of widgets."""
    notebook.metadata.clear()
    notebook.metadata.update(METADATA)
    count = 0
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
        tags = cell.metadata.get("tags")
        cell.metadata.clear()
        if tags:
            cell.metadata["tags"] = tags
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = _cleaned(outputs_of(cell), count)


def _cleaned(outputs: Sequence[NotebookNode], count: int) -> list[NotebookNode]:
    found: list[NotebookNode] = []
    for output in outputs:
        output.pop("transient", None)
        if output.output_type == "stream":
            output.text = _plain(output.text)
            # However a stream came in pieces, it is one text.
            if found and found[-1].output_type == "stream" and found[-1].name == output.name:
                found[-1].text += output.text
                continue
        elif output.output_type == "error":
            output.evalue = _plain(output.evalue)
            output.traceback = [f"{output.ename}: {output.evalue}"]
        else:
            if WIDGET in output.data:
                continue
            output.metadata = {}
            kept = [kind for kind in KEPT if kind in output.data]
            output.data = {
                kind: _plain(output.data[kind]) if kind[:5] == "text/" else output.data[kind] for kind in kept
            }
            if "image/png" in output.data:
                output.data = {"image/png": output.data["image/png"]}
            if output.output_type == "execute_result":
                output.execution_count = count
        found.append(output)
    return found


def _plain(text: str) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return text.replace(f"{ROOT}/", "").replace(str(ROOT), ".")


def difference(cell: NotebookNode, old: Sequence[NotebookNode], new: Sequence[NotebookNode]) -> str:
    """Empty where two cleaned outputs of a cell say the same; otherwise what differs first.

    In a cell tagged `measured` numbers may differ; in one tagged `trained` decimals may by 2 %, as after some
    iterations on another kind of processor; in one tagged `machine` everything. A hash is compared nowhere: it is
    another on another processor. Of the errors of several ranks one must be the same: which ranks still get to say
    theirs is chance. Pictures must be equal in number and size.
    """
    tags = cell.metadata.get("tags", [])
    if "machine" in tags:
        return ""
    pictures = [_sizes(outputs) for outputs in (old, new)]
    if pictures[0] != pictures[1]:
        return f"pictures of {pictures[1]} pixels, not {pictures[0]}"
    (before, errors_before), (after, errors_after) = (_lines(outputs, "measured" in tags) for outputs in (old, new))
    for was, now in zip(before, after, strict=False):
        if was != now and not ("trained" in tags and _is_close(was, now)):
            return f"printed {now!r}, not {was!r}"
    if len(before) != len(after):
        more = (before + after)[min(len(before), len(after)) :]
        return f"printed {len(after)} lines, not {len(before)}; the first of the others is {more[0]!r}"
    if errors_before != errors_after and not errors_before & errors_after:
        return f"printed the errors {sorted(errors_after)}, not {sorted(errors_before)}"
    return ""


def _lines(outputs: Sequence[NotebookNode], numbers_vary: bool) -> tuple[list[str], set[str]]:
    """The lines to compare one by one, and what ranks say of their errors, whichever rank it is."""
    lines = [HASH.sub("(hash)", line.rstrip()) for output in outputs for line in _text(output).splitlines()]
    lines = [line for line in lines if not line.startswith("note: ")]
    if numbers_vary:
        lines = [" ".join(NUMBER.sub("#", line).split()) for line in lines]
    errors = {NUMBER.sub("#", line) for line in lines if line.startswith("error: ")}
    return [line for line in lines if not line.startswith("error: ")], errors


def _is_close(was: str, now: str) -> bool:
    if NUMBER.sub("#", was) != NUMBER.sub("#", now):
        return False
    pairs = zip(NUMBER.findall(was), NUMBER.findall(now), strict=True)
    return all(a == b or ("." in a and abs(_value(a) - _value(b)) <= 0.02 * _value(a)) for a, b in pairs)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return "\n".join(value for kind, value in output.data.items() if kind[:5] == "text/")


def _sizes(outputs: Sequence[NotebookNode]) -> list[tuple[int, int]]:
    """Width and height of each picture, from the head of its PNG."""
    found = []
    for output in outputs:
        data = output.get("data", {}).get("image/png")
        if data:
            found.append(struct.unpack(">II", base64.b64decode(data)[16:24]))
    return found
