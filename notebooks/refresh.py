"""python -m notebooks.refresh [NAME ...]: executes the notebooks, and stores what they print where it has changed.

Each runs from a fresh kernel. Where a cell's text is as it was and its output says the same, the stored output stays:
running this twice changes nothing. NAME: such as 3_pingpong (default: all).
"""

import copy
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from notebooks.execute import FOLDER, CellFailed, execute, outputs_of, read
from notebooks.outputs import clean, difference
from step0_monolith.files import write_whole
from step0_monolith.options import RunError, UsageError, run_program


def chosen(names: list[str], folder: Path = FOLDER) -> list[Path]:
    """The notebooks with these names, all without any. Raises UsageError for one that is not there."""
    there = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    for name in names:
        if name.removesuffix(".ipynb") not in there:
            raise UsageError(f"there is no notebook {name!r}; choose from {', '.join(there)}")
    return [there[name.removesuffix(".ipynb")] for name in names] or list(there.values())


def refreshed(path: Path) -> NotebookNode:
    """The notebook with the outputs of a run of now, and the stored ones where they say the same."""
    stored = read(path)
    notebook = copy.deepcopy(stored)
    execute(notebook, path.name)
    clean(notebook)
    clean(stored)
    before = {cell.source: cell for cell in stored.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        old = before.get(cell.source) if cell.cell_type == "code" else None
        if old is not None and outputs_of(old) and not difference(cell, outputs_of(old), outputs_of(cell)):
            cell.outputs = old.outputs
    return notebook


def text_of(notebook: NotebookNode) -> str:
    """The file's content."""
    return nbformat.writes(notebook) + "\n"


def main() -> None:
    """Refreshes one notebook after the other; those that fail stay as they are, and are named at the end."""
    names = sys.argv[1:]
    if {"-h", "--help"} & set(names):
        print(__doc__)
        return
    failed = []
    for path in chosen(names):
        print(f"{path.name} ...", end=" ", flush=True)
        try:
            text = text_of(refreshed(path))
        except CellFailed as error:
            failed.append(str(error))
            print("failed")
            continue
        if text == path.read_text(encoding="utf-8"):
            print("as it was")
            continue
        write_whole(path, lambda part, text=text: part.write_text(text, encoding="utf-8"))
        print("refreshed")
    if failed:
        raise RunError("; ".join(failed))


if __name__ == "__main__":
    run_program(main)
