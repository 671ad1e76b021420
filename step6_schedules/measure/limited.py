"""torchrun --standalone --nproc-per-node 4 -m step6_schedules.measure.limited: training with little memory.

Each process may take so much memory for the model, and no more; the system refuses the rest. Started with plain
`python -m`, it trains the whole model in one process under the same limit: the monolith. Linux only.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from step0_monolith.config import Config
from step0_monolith.options import (
    Options,
    RunError,
    UsageError,
    one_of,
    option,
    optional,
    output_file,
    parse,
    run_program,
    whole,
)
from step0_monolith.train import Training
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import open_world
from step5_orchestrator.trainer import Trainer
from step6_schedules.measure.figures import Figure
from step6_schedules.measure.holds import Activations, Held, counted, formula
from step6_schedules.measure.program import save
from step6_schedules.schedules import SCHEDULES

PROGRAM = "step6_schedules.measure.limited"
NUM_LAYERS, WIDTH, ROWS, NUM_MICROBATCHES, NUM_ITERATIONS = 16, 1536, 64, 8, 3
MEGABYTE = 1e6
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class LimitOptions(Options):
    """How much memory there is, and for what."""

    megabytes: int = option(350, whole(1, 1_000_000), "millions of bytes that each process may take for the model")
    optimizer: str = option("adam", one_of("sgd", "adam"), "which optimizer; adam keeps twice the weights more")
    json: Path | None = option(None, optional(output_file(".json")), "file for the figures, a JSON list")


def config_of(options: LimitOptions) -> Config:
    """The model that is trained: 530 million bytes of weights, gradients and moments with Adam."""
    return Config(
        num_layers=NUM_LAYERS,
        width=WIDTH,
        batch_size=ROWS,
        num_microbatches=NUM_MICROBATCHES,
        num_iterations=NUM_ITERATIONS,
        data="random",
        optimizer=options.optimizer,
        learning_rate=1e-4,
    )


def check_system() -> None:
    """Raises UsageError where no process can be held to a limit of this kind: macOS takes one and does not keep it."""
    if sys.platform != "linux" or not STATUS.exists():
        raise UsageError(f"{PROGRAM} needs Linux: {sys.platform} does not hold a process to a limit of its memory")


def limit_memory(megabytes: int, parameters: Sequence[nn.Parameter]) -> None:
    """From here on this process may take `megabytes` for the model, its parameters, which it has already, included.

    What Python, torch and gloo occupy is not counted, as it is not in the memory of a GPU's model. Raises RunError
    where the system does not keep to it.
    """
    import resource  # not everywhere

    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmData:"))
    occupied = int(line.split()[1]) * 1024 - sum(p.nbytes for p in parameters)
    allowed = occupied + int(megabytes * MEGABYTE)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    try:
        torch.empty(int(megabytes * MEGABYTE), dtype=torch.uint8)
    except RuntimeError:
        return
    raise RunError("the system does not hold a process to a limit of its memory")


@contextlib.contextmanager
def refusal(who: str, megabytes: int, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Turns the system's refusal of memory into RunError, in one line that says what was held."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        weights = sum(p.nbytes for p in parameters) / MEGABYTE
        gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None) / MEGABYTE
        reason = (
            f"{who} cannot train in {megabytes} MB: with weights {weights:.1f} MB and gradients {gradients:.1f} MB "
            f"there, the system refused more memory"
        )
    else:
        return
    raise RunError(reason)


def monolith(options: LimitOptions, config: Config) -> None:
    """Trains the whole model in this process, within the limit."""
    torch.set_num_threads(config.threads)
    training = Training(config)
    limit_memory(options.megabytes, training.parameters)
    activations = Activations(training.parameters)
    with refusal("the monolith", options.megabytes, training.parameters), activations.counting():
        losses = [training.step() for _ in range(NUM_ITERATIONS)]
    held = counted(training.parameters, training.optimizer, activations)
    report(options, config, losses, [held])


def ranks(options: LimitOptions, config: Config, world_options: WorldOptions) -> None:
    """Trains this rank's stage, within the same limit."""
    launch = read_launch(PROGRAM, at_most=NUM_MICROBATCHES)
    table = SCHEDULES["1f1b"](launch.size, NUM_MICROBATCHES)
    with open_world(launch, world_options) as world:
        trainer = Trainer(config, world, table)
        parameters = trainer.pipeline.parameters()
        limit_memory(options.megabytes, parameters)
        activations = Activations(parameters)
        with refusal(f"rank {launch.rank}", options.megabytes, parameters), activations.counting():
            losses = [trainer.step() for _ in range(NUM_ITERATIONS)]
        held = world.gather(counted(parameters, trainer.optimizer.wrapped, activations))
        trainer.close()
    if launch.rank == 0:
        report(options, config, losses, held)


def report(options: LimitOptions, config: Config, losses: Sequence[float], held: Sequence[Held]) -> None:
    """Prints what each process held, and that they trained; writes the figure."""
    num_ranks = len(held)
    table = SCHEDULES["1f1b"](num_ranks, NUM_MICROBATCHES)
    predicted = [formula(config, table, rank) for rank in range(num_ranks)]
    for rank, (found, wanted) in enumerate(zip(held, predicted, strict=True)):
        verdict = "as the formula says" if found == wanted else f"the formula says {wanted.words()}"
        print(f"rank {rank} held {found.words()}, {verdict}")
    largest = max(held, key=lambda h: h.total)
    figure = Figure(
        "where the pipeline wins, the largest rank's bytes over the whole model's",
        f"{config.optimizer}, P={num_ranks}",
        value=largest.total / formula(config, SCHEDULES["1f1b"](1, NUM_MICROBATCHES), 0).total,
        beside={
            "limit, MB": options.megabytes,
            **{f"{name}, MB": value / MEGABYTE for name, value in largest._asdict().items()},
            "by formula / counted": max(p.total for p in predicted) / largest.total,
        },
    )
    save([figure], options.json)
    who = "the monolith" if num_ranks == 1 else f"{num_ranks} ranks"
    print(
        f"{who} trained {NUM_ITERATIONS} iterations in {options.megabytes} MB each: loss {losses[-1]:.6f}", flush=True
    )


def main() -> None:
    """Trains on ranks under torchrun, in one process without it."""
    takes = {LimitOptions: None, WorldOptions: ["timeout"]}
    options, world_options = parse(torchrun_command(PROGRAM), __doc__, takes)
    check_system()
    config = config_of(options)
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        ranks(options, config, world_options)
    else:
        monolith(options, config)


if __name__ == "__main__":
    run_program(main)
