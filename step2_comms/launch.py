"""What the launcher told this process: its rank, and how many there are."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from step0_monolith.options import UsageError


@dataclass(frozen=True)
class Launch:
    """This process's place among all, and among those on its own host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def torchrun_command(module: str, num_ranks: int = 4) -> str:
    """The command line that runs `module` on ranks of this host."""
    return f"torchrun --standalone --nproc-per-node {num_ranks} -m {module}"


def read_launch(
    module: str, *, at_least: int = 1, at_most: int | None = None, environment: Mapping[str, str] = os.environ
) -> Launch:
    """Reads and checks the launcher's environment; opens nothing.

    module: the program's name, for the command that the error shows. Raises UsageError when the program was not
    started by torchrun, when the variables are incomplete or make no sense, or when the number of ranks does not fit.
    """
    command = torchrun_command(module, max(at_least, 4) if at_most is None else at_most)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in names if name in environment]
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(present):
        raise UsageError(f"{module} runs on several ranks and was not started by torchrun; run: {command}")
    # By hand, without torchrun, the two LOCAL_ variables are often left out; on one host they follow from the others.
    missing = [name for name in names if name not in present and not name.startswith("LOCAL_")]
    if missing:
        raise UsageError(f"{', '.join(present)} set but {', '.join(missing)} missing; run: {command}")

    def whole(name: str, default: int) -> int:
        text = environment.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise UsageError(f"{name}={text!r} is not a whole number; run: {command}")
        return int(text)

    rank, size = whole("RANK", 0), whole("WORLD_SIZE", 1)
    local_rank, local_size = whole("LOCAL_RANK", rank), whole("LOCAL_WORLD_SIZE", size)
    if not 1 <= whole("MASTER_PORT", 0) <= 65535:
        raise UsageError(f"MASTER_PORT={environment['MASTER_PORT']} is not a port (1..65535); run: {command}")
    if not environment["MASTER_ADDR"].strip():
        raise UsageError(f"MASTER_ADDR={environment['MASTER_ADDR']!r} is not the name of a host; run: {command}")
    if rank >= size or local_rank >= local_size or local_size > size:
        raise UsageError(
            f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_size} do not fit together: "
            f"a rank is below the number of ranks; run: {command}"
        )
    if size < at_least:
        raise UsageError(f"{module} needs at least {at_least} ranks, not {size}; run: {command}")
    if at_most is not None and size > at_most:
        raise UsageError(f"{module} takes at most {at_most} ranks, not {size}; run: {command}")
    return Launch(rank, size, local_rank, local_size)
