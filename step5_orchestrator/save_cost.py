"""torchrun --standalone --nproc-per-node 2 -m step5_orchestrator.save_cost: what saving costs, and others beside it.

For each size, in turn: a checkpoint of this course, torch.distributed.checkpoint with its safetensors writer and with
its own format, and torch.save of each rank's part. Then some iterations with a save at their start, which either go on
beside the writing or wait for it.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from step0_monolith.checkpoints import CheckpointOptions
from step0_monolith.config import Config
from step0_monolith.options import Options, UsageError, option, parse, run_program, whole
from step2_comms.device import WorldOptions
from step2_comms.launch import Launch, read_launch, torchrun_command
from step2_comms.world import World, open_world
from step5_orchestrator.checkpoint import Checkpoints
from step5_orchestrator.costs import Cost
from step5_orchestrator.emulate import EmulateOptions
from step5_orchestrator.naive import naive
from step5_orchestrator.trainer import Trainer

PROGRAM = "step5_orchestrator.save_cost"
NUM_LAYERS = 8
FLOAT_BYTES = 4


def _megabytes(flag: str, value: object) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(whole(1, 10_000)(flag, part) for part in parts)


@dataclass(frozen=True)
class CostOptions(Options):
    """What is measured."""

    megabytes: tuple[int, ...] = option((1, 10, 100), _megabytes, "sizes of all parameters together, such as 1,10,100")
    rounds: int = option(5, whole(1, 1000), "measurements of each, in turn; the median is shown")
    num_iterations: int = option(5, whole(1, 1000), "iterations after each save, for the last two columns")


def config_of(megabytes: int) -> Config:
    """A model whose parameters take about so many million bytes, trained with Adam, which keeps twice as much more."""
    width = round((megabytes * 1e6 / FLOAT_BYTES / (NUM_LAYERS - 2)) ** 0.5)
    return Config(
        num_layers=NUM_LAYERS, width=width, batch_size=32, num_microbatches=4, data="random", optimizer="adam"
    )


@contextlib.contextmanager
def shared_folder(world: World) -> Iterator[Path]:
    """A temporary directory that all ranks of this host use."""
    with tempfile.TemporaryDirectory() if world.rank == 0 else contextlib.nullcontext() as own:
        yield Path(world.gather_everywhere(own)[0])
        world.gather_everywhere(None)


def seconds(world: World, work: Callable[[], object]) -> float:
    """How long `work` takes until the last rank is done with it."""
    world.gather_everywhere(None)
    start = time.perf_counter()
    work()
    return max(world.gather_everywhere(time.perf_counter() - start))


def library(tensors: dict[str, Tensor], writer: Callable[[Path], dcp.StorageWriter], folder: Path) -> None:
    """torch.distributed.checkpoint with one of its writers."""
    dcp.save(tensors, storage_writer=writer(folder))


def measure(world: World, launch: Launch, options: CostOptions, emulated: Cost | None, megabytes: int) -> dict:
    """Median seconds of each way, for one size."""
    config = config_of(megabytes)
    trainer = Trainer(config, world, naive(world.size, config.num_microbatches), emulate=emulated)
    trainer.step()
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for number in range(options.rounds):
        with shared_folder(world) as folder:
            saving = CheckpointOptions(checkpoint_dir=folder / "ours", keep_checkpoints=1)
            with Checkpoints(saving, config, launch) as checkpoints:
                checkpoints.start(trainer)
                copied = []

                def save(after: Callable[[], object] = lambda: None, checkpoints=checkpoints, copied=copied) -> None:
                    start = time.perf_counter()
                    checkpoints.save(trainer)
                    copied.append(time.perf_counter() - start)
                    after()

                finish = partial(checkpoints.finish, world)
                note("whole", seconds(world, lambda save=save, finish=finish: save(finish)))
                note("copied", max(world.gather_everywhere(copied[-1])))

                def iterate() -> None:
                    for _ in range(options.num_iterations):
                        trainer.step()

                def waits(save=save, finish=finish, iterate=iterate) -> None:
                    save(finish)
                    iterate()

                def beside(save=save, finish=finish, iterate=iterate) -> None:
                    save(iterate)
                    finish()

                for name, work in [("waits", waits), ("beside", beside)][:: 1 if number % 2 else -1]:
                    note(name, seconds(world, work))
            tensors = trainer.optimizer.state().tensors
            safetensors = partial(HuggingFaceStorageWriter, save_distributed=True)
            note("dcp", seconds(world, partial(library, tensors, safetensors, folder / "safetensors")))
            note("dcp_own", seconds(world, partial(library, tensors, dcp.FileSystemWriter, folder / "own")))
            note("torch", seconds(world, partial(torch.save, tensors, folder / f"{world.rank}.pt")))
    trainer.close()
    return {name: statistics.median(values) for name, values in found.items()}


COLUMNS = [
    ("copied", "training stands still"),
    ("whole", "until it is whole"),
    ("dcp", "DCP, safetensors"),
    ("dcp_own", "DCP, own format"),
    ("torch", "torch.save"),
]


def main() -> None:
    """Measures each size and prints a table."""
    takes = {CostOptions: None, EmulateOptions: None, WorldOptions: ["device", "timeout"]}
    options, emulation, world_options = parse(torchrun_command(PROGRAM, 2), __doc__, takes)
    launch = read_launch(PROGRAM, at_most=NUM_LAYERS)
    if not options.megabytes:
        raise UsageError("--megabytes needs at least one size")
    with open_world(launch, world_options) as world:
        for megabytes in options.megabytes:
            found = measure(world, launch, options, emulation.emulate, megabytes)
            if world.rank == 0:
                print(f"{megabytes} MB of parameters, and twice as much of Adam's; {world.size} ranks", flush=True)
                for name, words in COLUMNS:
                    print(f"  {words:<22} {found[name] * 1e3:9.1f} ms")
                iterations = f"a save and {options.num_iterations} iterations"
                print(f"  {iterations}: {found['waits'] * 1e3:.1f} ms one after the other,")
                print(f"  {found['beside'] * 1e3:.1f} ms with the writing beside them", flush=True)


if __name__ == "__main__":
    run_program(main)
