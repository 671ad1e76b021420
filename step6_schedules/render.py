"""A table as text, in time: a line a rank, a column a slot."""

import math

from step5_orchestrator.grid import WIDTH
from step6_schedules.simulate import Simulation

MAX_PANELS = 12


def draw_text(simulation: Simulation, width: int = WIDTH) -> str:
    """The table's cells where they stand in time, in panels of at most `width` characters, one below the other.

    A column is as long as the shortest action, and times are rounded to it; longer actions go on with `-`, `.` is idle,
    and `+` joins a paired cell. Notes below say so where a reader cannot know it.
    """
    table, times = simulation.table, simulation.times
    unit = min(simulation.cost.of(action) for action in times)
    names = {action: f"{action}+" if action in table.pairs else str(action) for action in times}
    column = max(map(len, names.values())) + 1
    label = len(f"rank {table.num_ranks - 1}") + 2
    columns = max(1, (width - label) // column)

    def place(moment: float) -> int:
        # Rounded up from a half, so that starts at least a column apart stay apart.
        return math.floor(moment / unit + 0.5 + 1e-9) * column

    length = place(simulation.makespan)
    panels = -(-length // (columns * column))
    if panels > MAX_PANELS:
        slots = round(simulation.makespan / unit)
        return f"(too long to print: {slots} columns; --csv, --json and --png hold it)"
    lines = []
    for row in table.rows:
        line = list(f"{'.':<{column}}" * (length // column))
        for action in row:
            start, end = map(place, times[action])
            line[start:end] = names[action].ljust(end - start - 1, "-" if end - start > column else " ") + " "
        lines.append("".join(line))
    parts = []
    for panel in range(panels):
        start = panel * columns * column
        stop = min(start + columns * column, length)
        ruler = "".join(f"{at // column:<{5 * column}}" for at in range(start, stop, 5 * column))
        block = [f"{'slot' if unit == 1 else 'column':<{label}}{ruler}".rstrip()]
        block += [f"{f'rank {r}':<{label}}{line[start:stop]}".rstrip() for r, line in enumerate(lines)]
        parts.append("\n".join(block))
    if any(round(moment / unit, 6) % 1 for times_of in times.values() for moment in times_of):
        parts.append(f"(a column is {unit:g}; times are rounded to it)")
    if table.pairs:
        parts.append("(+ joins a forward and the backward after it in one cell)")
    return "\n\n".join(parts)
