"""python -m step6_schedules.measure.wins: where a pipeline wins against one process, and where it does not.

memory: a model that one process cannot train and ranks can, each held to the same limit by the system (Linux only).
devices: 2 and 4 emulated devices against one. sizes: 2 ranks against 2 threads on the same two cores. Starts torchrun
itself; each part can also be run by the command that is shown.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from step0_monolith.files import check_writable, write_whole
from step0_monolith.options import Options, RunError, UsageError, option, parse, run_program
from step6_schedules.measure.figures import Figure
from step6_schedules.measure.launch import ending_on_signals, run
from step6_schedules.measure.limited import LimitOptions, check_system
from step6_schedules.measure.program import MeasureOptions, chosen_from

PROGRAM = "python -m step6_schedules.measure.wins"
MEASURE = "step6_schedules.measure"
PARTS = ("memory", "devices", "sizes")
# Under a limit that the whole model exceeds by half, and each number of ranks with room enough to be counted.
WITH_ROOM = ((1, 1000), (2, 500))
LIMITED_RANKS = 4
SECONDS = 120


@dataclass(frozen=True)
class WinsOptions(Options):
    """What is shown."""

    parts: tuple[str, ...] = option(PARTS, chosen_from(PARTS), f"some of {','.join(PARTS)}")


def refused() -> str | None:
    """What the monolith says under the limit; None when it trains all the same."""
    command = [sys.executable, "-m", f"{MEASURE}.limited"]
    print(f"\n$ python -m {MEASURE}.limited", flush=True)
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if found.returncode == 0:
        return None
    line = next((line for line in found.stderr.splitlines() if line.startswith("error: ")), found.stderr.strip())
    print(line, flush=True)
    return line


def measured(module: str, num_ranks: int, *arguments: object) -> list[Figure]:
    """The figures of one program. Raises RunError when it fails."""
    found = run("wins", f"{MEASURE}.{module}", num_ranks, list(map(str, arguments)))
    if found.error:
        raise RunError(f"{found.command}: {found.error}")
    return found.figures


def memory() -> list[Figure]:
    """What ranks hold, and who trains under the limit. Raises RunError when it is not as it should be."""
    try:
        check_system()
    except UsageError as error:
        print(f"left out: memory: {error}", flush=True)
        return []
    line, limit = refused(), LimitOptions().megabytes
    if line is None or f"cannot train in {limit} MB" not in line:
        raise RunError(f"the monolith should not fit into {limit} MB: {line or 'it has trained'}")
    figures = measured("limited", LIMITED_RANKS)
    for num_ranks, megabytes in WITH_ROOM:
        figures += measured("limited", num_ranks, "--megabytes", megabytes)
    return figures


def all_parts(parts: Iterable[str], rounds: int) -> list[Figure]:
    """The figures of the parts, in this order."""
    figures: list[Figure] = []
    if "memory" in parts:
        figures += memory()
    if "devices" in parts:
        for num_ranks in (2, 4):
            figures += measured("wins_devices", num_ranks, "--rounds", rounds)
    if "sizes" in parts:
        figures += measured("wins_sizes", 2, "--rounds", rounds)
    return figures


def main() -> None:
    """Shows one part after another."""
    chosen, options = parse(PROGRAM, __doc__, {WinsOptions: None, MeasureOptions: ["rounds", "json"]})
    check_writable("--json", options.json)
    with ending_on_signals():
        figures = all_parts(chosen.parts, options.rounds)
    if options.json is not None:
        # The lines were printed by the programs that were started.
        text = json.dumps([figure.to_json() for figure in figures], indent=1)
        write_whole(options.json, lambda file: file.write_text(text))


if __name__ == "__main__":
    run_program(main)
