"""What else a run must remember to go on as if nothing had happened: its config, its history, its random numbers."""

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from step0_monolith.checkpoints import Checkpoint, CheckpointDirectory, CheckpointOptions
from step0_monolith.config import Config
from step0_monolith.options import UsageError, flag_of
from step0_monolith.payload import Payload, PayloadError

# With another value of one of these the weights would not fit, or rows would be repeated or skipped.
MUST_AGREE = ("num_layers", "width", "dtype", "optimizer", "seed", "data", "batch_size", "accumulate")
_HISTORY = ("losses", "iteration_seconds")


@dataclass
class History:
    """The loss of each iteration so far, and its seconds."""

    losses: list[float] = field(default_factory=list)
    iteration_seconds: list[float] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """As tensors for a payload."""
        return {f"history/{name}": torch.tensor(getattr(self, name), dtype=torch.float64) for name in _HISTORY}


def history_from(payload: Payload, iteration: int) -> History:
    """The history in a payload that was saved after so many iterations. Raises PayloadError when there is none."""
    found = [payload.tensors.get(f"history/{name}") for name in _HISTORY]
    if any(x is None or x.shape != (iteration,) or x.dtype != torch.float64 for x in found):
        raise PayloadError(f"the history of the {iteration} iterations is missing")
    return History(*(x.tolist() for x in found))


def random_state(rank: int = 0, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a rank's random generators, of torch and of Python, as tensors and scalars of a payload.

    Nothing of the course draws from them (see seeds.py), but a module of a user's own may.
    """
    tensors = {f"random/{rank}/torch": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        tensors[f"random/{rank}/cuda"] = torch.cuda.get_rng_state(device)
    version, numbers, gauss = random.getstate()
    return tensors, {"random": [version, list(numbers), gauss]}


def restore_random_state(payload: Payload, rank: int = 0, device: torch.device | str = "cpu") -> None:
    """Sets the generators to what was saved. Raises PayloadError for what is no such state."""
    try:
        version, numbers, gauss = payload.scalars["random"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(payload.tensors[f"random/{rank}/torch"].clone())
        cuda = payload.tensors.get(f"random/{rank}/cuda")
        if torch.device(device).type == "cuda" and cuda is not None:
            torch.cuda.set_rng_state(cuda.clone(), device)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise PayloadError(f"the random state cannot be read: {error}") from None


def check_fits(config: Config, checkpoint: Checkpoint) -> list[str]:
    """Raises UsageError when a checkpoint is of another model or of other data; returns what else is different now."""
    saved, what = checkpoint.manifest["config"], f"checkpoint {str(checkpoint.path)!r}"
    for name in MUST_AGREE:
        if saved.get(name) != getattr(config, name):
            raise UsageError(
                f"{flag_of(name)} {getattr(config, name)}, but {what} was saved with {saved.get(name)}; say "
                f"{flag_of(name)} {saved.get(name)}, or choose another --checkpoint-dir"
            )
    if checkpoint.iteration > config.num_iterations:
        raise UsageError(
            f"--num-iterations {config.num_iterations}, but {what} has done {checkpoint.iteration} already; say more"
        )
    return [
        f"{flag_of(name)} is now {value}, it was {saved.get(name)}"
        for name, value in dataclasses.asdict(config).items()
        if saved.get(name) != value
    ]


def check_start(options: CheckpointOptions, config: Config, iterations: list[int]) -> None:
    """Raises UsageError for a run that would mix its checkpoints with another's, or cannot save when it should."""
    if options.checkpoint_every is not None and options.checkpoint_every % config.accumulate:
        raise UsageError(
            f"--checkpoint-every {options.checkpoint_every} is not a multiple of --accumulate {config.accumulate}: "
            f"gradients between two updates are not saved"
        )
    if iterations and not options.resume:
        raise UsageError(
            f"--checkpoint-dir {str(options.checkpoint_dir)!r} has checkpoints up to iteration {iterations[-1]}; add "
            f"--resume to go on from there, or choose another directory"
        )


def resumed(checkpoint: Checkpoint | None, changed: list[str], given: object, num_iterations: int) -> str:
    """What a run says at its start under `--resume`."""
    if checkpoint is None:
        return f"no checkpoint in {str(given)!r} yet: starting with iteration 1"
    lines = [f"resuming after iteration {checkpoint.iteration} from {str(checkpoint.path)!r}", *changed]
    if checkpoint.iteration == num_iterations:
        lines.append("nothing is left to train; to go on, raise --num-iterations")
    return "\n".join(lines)


class Opened(NamedTuple):
    """A locked directory, the checkpoint to go on from (None: from the beginning), and what to say about it."""

    directory: CheckpointDirectory
    newest: Checkpoint | None
    say: str


def open_directory(options: CheckpointOptions, config: Config) -> Opened:
    """Locks the directory of a run's checkpoints and looks into it; the caller closes it.

    Raises UsageError when it cannot be used, or holds a checkpoint that does not fit, and PayloadError when that is
    damaged.
    """
    directory = CheckpointDirectory(options.checkpoint_dir, options.keep_checkpoints)
    directory.lock()
    try:
        check_start(options, config, directory.iterations())
        newest = directory.newest() if options.resume else None
        changed = [] if newest is None else check_fits(config, newest)
    except BaseException:
        directory.close()
        raise
    return Opened(directory, newest, resumed(newest, changed, options.checkpoint_dir, config.num_iterations))


def due(options: CheckpointOptions, iteration: int, num_iterations: int) -> bool:
    """Whether to save after so many iterations."""
    if options.checkpoint_dir is None:
        return False
    return iteration == num_iterations or bool(options.checkpoint_every and iteration % options.checkpoint_every == 0)


def manifest(config: Config, iteration: int, files: Mapping[str, Any], **about: object) -> dict[str, Any]:
    """The manifest of a checkpoint. about: what the writer says of itself."""
    return {"iteration": iteration, "config": dataclasses.asdict(config), **about, "files": dict(files)}
