"""Checkpoints of a pipeline: each rank writes its own layers, and takes what it needs at any number of ranks."""

import json
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from step0_monolith.checkpoints import Checkpoint, CheckpointDirectory, CheckpointOptions, file_of, write_payload
from step0_monolith.config import Config
from step0_monolith.options import RunError
from step0_monolith.payload import PayloadError
from step0_monolith.resume import (
    due,
    history_from,
    manifest,
    open_directory,
    random_state,
    restore_random_state,
)
from step2_comms.launch import Launch
from step2_comms.world import World
from step5_orchestrator.background import Background

if TYPE_CHECKING:
    from step5_orchestrator.trainer import Trainer

RUN_NAME_CHARACTERS = 12


class Checkpoints:
    """The checkpoints of one run, whose ranks write together. Used as `with`: the directory is locked inside.

    Without --checkpoint-dir nothing is ever due, and nothing is done.
    """

    def __init__(self, options: CheckpointOptions, config: Config, launch: Launch) -> None:
        """Rank 0 locks the directory and looks into it, before any process group opens.

        Raises UsageError when it cannot be used, or holds a checkpoint of another model, and RunError when that is
        damaged.
        """
        self._options, self._config = options, config
        self._directory: CheckpointDirectory | None = None
        self._newest: Checkpoint | None = None
        self._say = ""
        self._background = Background()
        self._under_way: str | None = None  # the key under which rank 0 tells that a checkpoint is whole
        if options.checkpoint_dir is None:
            return
        if launch.rank == 0:
            self._directory, self._newest, self._say = open_directory(options, config)
        else:
            self._directory = CheckpointDirectory(options.checkpoint_dir, options.keep_checkpoints)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self._background.give_up()
        if self._directory is not None:
            self._directory.close()

    def start(self, trainer: "Trainer") -> None:
        """Gives the run a name that all ranks know, and takes over the newest checkpoint under --resume.

        Called on every rank, before the other methods. Raises PayloadError for a checkpoint that is damaged.
        """
        if self._directory is None:
            return
        world = trainer.world
        self._store = world.store.clone()  # the thread's own: the main thread may be waiting on the other
        key = world.new_key("checkpoints")
        if world.rank == 0:
            about = {
                "run": uuid.uuid4().hex[:RUN_NAME_CHARACTERS],
                "resume": None if self._newest is None else self._newest.iteration,
            }
            world.store.set(key, json.dumps(about))
        about = json.loads(world.fetch(key, "the name of the run", 0))
        self._run = about["run"]
        if world.rank > 0 and about["resume"] is not None:
            self._newest = self._directory.at(about["resume"])
        if self._newest is not None:
            self._take_over(self._newest, trainer)
        if self._options.resume and world.rank == 0:
            print(self._say, flush=True)

    def _take_over(self, newest: Checkpoint, trainer: "Trainer") -> None:
        world = trainer.world
        payloads = newest.payloads(trainer.pipeline.layers())
        trainer.optimizer.load(list(payloads.values()))
        history = None
        if world.rank == 0:
            first = payloads.get(file_of(0)) or newest.payload(file_of(0))
            history = history_from(first, newest.iteration)
        trainer.history = world.gather_everywhere(history)[0]
        if trainer.optimizer.iterations != newest.iteration:
            raise PayloadError(f"the files of {str(newest.path)!r} are of iteration {trainer.optimizer.iterations}")
        if newest.manifest["num_ranks"] == world.size:
            own = file_of(world.rank)
            restore_random_state(payloads.get(own) or newest.payload(own), world.rank, world.device)

    def after_iteration(self, trainer: "Trainer") -> None:
        """Starts saving when it is time; called on every rank. Raises what an earlier save has raised."""
        self._background.check()
        if due(self._options, trainer.iteration, self._config.num_iterations):
            self.save(trainer)

    def save(self, trainer: "Trainer") -> None:
        """Saves what has been done so far; called on every rank.

        Returns once everything has been copied: files are written beside the training that follows. Waits for the save
        before this one first, so that there is never more than one copy.
        """
        self._background.wait()
        world, iteration = trainer.world, trainer.iteration
        tensors, scalars = random_state(world.rank, world.device)
        layers, names = [], []
        if trainer.replicas is None or trainer.replicas.index == 0:
            state = trainer.optimizer.state()
            layers, names = sorted(trainer.pipeline.layers()), sorted(state.tensors)
            tensors, scalars = {**tensors, **state.tensors}, {**scalars, **state.scalars}
        if world.rank == 0:
            tensors |= trainer.history.tensors()
        key = world.new_key(f"checkpoint/{iteration}")
        entry = {"layers": layers, "tensors": names}
        about = {
            "schedule": trainer.table.name,
            "num_ranks": world.size,
            "data_parallel": 1 if trainer.replicas is None else trainer.replicas.num_replicas,
        }
        self._under_way = f"{key}/done"
        self._background.start(lambda: self._write(world, key, iteration, tensors, scalars, entry, about))

    def finish(self, world: World) -> None:
        """Waits until the last save is whole; called on every rank. Raises RunError on all of them when it is not."""
        self._background.wait()
        if self._under_way is not None:
            error = world.fetch(self._under_way, "the end of the last checkpoint", 0).decode()
            self._under_way = None
            if error:
                raise RunError(error)

    def _write(
        self,
        world: World,
        key: str,
        iteration: int,
        tensors: dict[str, Tensor],
        scalars: dict[str, Any],
        entry: dict[str, Any],
        about: dict[str, Any],
    ) -> None:
        """In the thread: writes this rank's file and tells rank 0, which makes the checkpoint visible."""
        part = self._directory.part(iteration, self._run)
        try:
            entry |= write_payload(part / file_of(world.rank), tensors, scalars)
            self._store.set(f"{key}/{world.rank}", json.dumps(entry))
            if world.rank == 0:
                files = {file_of(rank): self._entry_of(world, key, rank, part) for rank in range(world.size)}
                self._directory.publish(part, manifest(self._config, iteration, files, **about))
                self._store.set(f"{key}/done", "")
        except Exception as error:
            self._store.set(f"{key}/{world.rank}", json.dumps({"error": f"rank {world.rank}: {error}"}))
            if world.rank == 0:
                self._store.set(f"{key}/done", str(error))
            raise

    def _entry_of(self, world: World, key: str, rank: int, part: Path) -> dict[str, Any]:
        """What `rank` says of its file, once it is on the disk."""
        deadline = time.monotonic() + world.timeout.total_seconds()
        while not self._store.check([f"{key}/{rank}"]):
            if self._background.is_given_up:
                raise RunError(f"the run ended before rank {rank} had written its part of {str(part)!r}")
            if time.monotonic() > deadline:
                raise RunError(f"rank {rank} did not write its part of {str(part)!r} in time (--timeout)")
            time.sleep(0.005)
        entry = json.loads(self._store.get(f"{key}/{rank}"))
        if "error" in entry:
            raise RunError(entry["error"])
        return entry
