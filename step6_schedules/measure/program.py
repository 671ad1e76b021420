"""What the rank programs of `make bench` have in common: their sizes, their flags, and the file of their figures."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from step0_monolith.config import Config
from step0_monolith.files import write_whole
from step0_monolith.options import Options, one_of, option, optional, output_file, whole
from step6_schedules.measure.figures import Figure

# width, layers, rows of a batch, microbatches
SIZES = {"tiny": (128, 16, 32, 8), "middle": (1024, 16, 256, 8), "large": (2048, 8, 512, 16)}


@dataclass(frozen=True)
class MeasureOptions(Options):
    """How much is measured, and where the figures go."""

    size: str = option("tiny", one_of(*SIZES), "tiny (overhead counts), middle or large (arithmetic counts)")
    rounds: int = option(7, whole(1, 1000), "rounds in which all take turns; medians are shown")
    json: Path | None = option(None, optional(output_file(".json")), "file for the figures, a JSON list")


def config_of(size: str) -> Config:
    """The run of a size. A small step: the same batch is used again and again, and must not blow up."""
    width, num_layers, batch_size, num_microbatches = SIZES[size]
    return Config(
        num_layers=num_layers,
        width=width,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        data="random",
        learning_rate=1e-4,
    )


def save(figures: Sequence[Figure], path: Path | None) -> None:
    """Prints the figures, and writes them where they are wanted; called on rank 0."""
    for figure in figures:
        print(figure.line(), flush=True)
    if path is not None:
        text = json.dumps([figure.to_json() for figure in figures], indent=1)
        write_whole(path, lambda file: file.write_text(text))


def chosen_from(names: Iterable[str]) -> Callable[[str, object], tuple[str, ...]]:
    """Some of the names, with commas between them."""
    one = one_of(*names)

    def convert(flag: str, value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(one(flag, part) for part in parts)

    return convert
