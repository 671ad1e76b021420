"""Rules that the steps' source keeps, checked by reading it: what imports what, and where the solutions are."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

STEP = re.compile(r"step(\d)_\w+")
BEGIN = re.compile(r"# BEGIN SOLUTION (step(\d)\.[a-z][a-z0-9_]*)")
FORBIDDEN = ("tests", "course", "notebooks")


def step_files(root: Path) -> list[Path]:
    """Every Python file of every step."""
    return sorted(path for path in root.glob("step[0-9]_*/**/*.py"))


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of each import in a file, relative ones and `import_module("name")` included."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the file's own package, each further dot the one around it.
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = [*start, *(node.module.split(".") if node.module else [])]
            # Without a module (`from . import x`, `from .. import step6_schedules`) the names are modules themselves.
            yield from ((node.lineno, ".".join(module or [alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "run_module") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def wrong_arrows(root: Path) -> list[str]:
    """Imports of a later step, of the tests or of the teaching tools, a line each."""
    wrong = []
    for path in step_files(root):
        name = path.relative_to(root)
        own = int(STEP.fullmatch(name.parts[0])[1])
        for line, module in imports(path, root):
            top = module.split(".")[0]
            step = STEP.fullmatch(top)
            if top in FORBIDDEN or (step and int(step[1]) > own):
                wrong.append(f"{name}:{line} imports {module}")
    return wrong


def _markers(path: Path) -> list[tuple[int, int, str]]:
    """(line, column, text) of the comments that speak of a solution."""
    with tokenize.open(path) as file:
        comments = [token for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT]
    return [(*c.start, c.string.strip()) for c in comments if "SOLUTION" in c.string.upper()]


def _ends_a_body(path: Path, begin: int, end: int, columns: set[int]) -> bool:
    """Whether the lines between are the last statements of one function with a docstring, and nothing else."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {node for node in ast.walk(tree) if isinstance(node, ast.stmt) and begin < node.lineno < end}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not ast.get_docstring(node):
            continue
        solution = [part for part in node.body[1:] if part in inside]
        if solution and solution[-1] is node.body[-1] and solution[-1].end_lineno < end:
            within = {inner for part in solution for inner in ast.walk(part)}
            return inside <= within and columns == {solution[0].col_offset}
    return False


def solutions(root: Path) -> tuple[dict[str, str], list[str]]:
    """Where each solution is ({"step1.evenly": "step1_partition/partition.py:46"}), and what is wrong, a line each."""
    places: dict[str, str] = {}
    wrong: list[str] = []
    for path in step_files(root):
        name, markers = path.relative_to(root), _markers(path)
        while markers:
            line, column, text = markers.pop(0)
            where = f"{name}:{line}"
            begin = BEGIN.fullmatch(text)
            if not begin:
                wrong.append(f"{where} is not '# BEGIN SOLUTION stepN.name' (or has no such line before it): {text}")
                continue
            if not markers or markers[0][2] != "# END SOLUTION":
                wrong.append(f"{where} has no '# END SOLUTION'")
                continue
            end, end_column, _ = markers.pop(0)
            if begin[1] in places:
                wrong.append(f"{where} {begin[1]} is also at {places[begin[1]]}")
            places[begin[1]] = where
            if not name.parts[0].startswith(f"step{begin[2]}_"):
                wrong.append(f"{where} {begin[1]} is not in its step's folder")
            if not _ends_a_body(path, line, end, {column, end_column}):
                wrong.append(f"{where} {begin[1]} does not hold the end of one function's body, after its docstring")
    return places, wrong
