"""Training the whole model in one process."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from step0_monolith.checkpoints import Checkpoint, CheckpointDirectory, CheckpointOptions, file_of, write_payload
from step0_monolith.config import Config
from step0_monolith.data import batch, test_set
from step0_monolith.loss import batch_weight
from step0_monolith.model import Layer, layers
from step0_monolith.options import Options, option, optional, output_file
from step0_monolith.payload import PayloadError
from step0_monolith.progress import Progress
from step0_monolith.reference import evaluate, forward_backward
from step0_monolith.result import Result, weights_sha256
from step0_monolith.resume import (
    History,
    due,
    history_from,
    manifest,
    open_directory,
    random_state,
    restore_random_state,
)
from step0_monolith.state import collect, counts_of, restore
from step0_monolith.update import (
    are_finite,
    learning_rate,
    left_out,
    make_optimizer,
    norm_of,
    not_finite,
    squared_norms,
    stopped,
    update_weights,
)

NO_CHECKPOINTS = CheckpointOptions()
FILE = file_of(0)


@dataclass(frozen=True)
class ResultOptions(Options):
    """Where a run writes what it did."""

    result: Path | None = option(None, optional(output_file(".json")), "file for the result, a JSON object")


class Training:
    """The whole model in one process: its layers, its optimizer, and what has been done so far."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layers: list[Layer] = layers(config)
        self.parameters = [p for layer in self.layers for p in layer.parameters()]
        self.optimizer = make_optimizer(config, self.parameters)
        self.history = History()
        self.updates = 0
        self._wrong: str | None = None  # with the update that is being made
        self._first_wrong: str | None = None

    @property
    def losses(self) -> list[float]:
        """The loss of each iteration so far."""
        return self.history.losses

    def step(self) -> float:
        """One iteration; returns its loss, the mean over the batch before the update.

        Raises RunError for a loss or a gradient that is not finite, before anything is updated, or leaves that update
        out (`on_nonfinite`).
        """
        start, config, iteration = time.perf_counter(), self.config, len(self.losses)
        inputs, targets = batch(config, iteration)
        update, part = divmod(iteration, config.accumulate)
        if part == 0:
            self.optimizer.zero_grad()
            self._wrong = None
        share = forward_backward(
            self.layers,
            inputs,
            targets,
            config.num_microbatches,
            seed=config.seed,
            iteration=update,
            first_microbatch=part * config.num_microbatches,
            weight=batch_weight(targets) * config.accumulate,
        )
        loss = share.item() * config.accumulate
        is_last = part == config.accumulate - 1
        norm = norm_of(squared_norms(self.parameters)) if is_last and config.max_grad_norm is not None else None
        places = None if are_finite(self.parameters) else ""
        self._wrong = not_finite(iteration, loss, places, norm) or self._wrong
        self._first_wrong = self._first_wrong or self._wrong
        if self._wrong and config.on_nonfinite == "stop":
            raise stopped(self._wrong)
        if is_last and not self._wrong:
            update_weights(self.optimizer, learning_rate(config, self.updates), norm, config.max_grad_norm)
            self.updates += 1
        self.history.losses.append(loss)
        self.history.iteration_seconds.append(time.perf_counter() - start)
        return loss

    def left_out(self) -> str | None:
        """What to say about updates that were left out, if any was."""
        return left_out(len(self.losses), self.config.accumulate, self.updates, self._first_wrong)

    def save(self, directory: CheckpointDirectory) -> None:
        """Writes a checkpoint of what has been done so far."""
        state, (tensors, scalars) = collect(dict(enumerate(self.layers)), self.optimizer), random_state()
        part = directory.part(len(self.losses), "monolith")
        written = write_payload(
            part / FILE,
            {**state.tensors, **self.history.tensors(), **tensors},
            {**state.scalars, **scalars, "updates": self.updates, "iterations": len(self.losses)},
        )
        entry = {**written, "layers": list(range(len(self.layers))), "tensors": sorted(state.tensors)}
        directory.publish(
            part, manifest(self.config, len(self.losses), {FILE: entry}, schedule=None, num_ranks=1, data_parallel=1)
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Takes over a checkpoint of any number of ranks. Raises PayloadError for one that is damaged."""
        payloads = checkpoint.payloads(range(len(self.layers)))
        updates, iterations = counts_of(list(payloads.values()))
        if iterations != checkpoint.iteration:
            raise PayloadError(f"the files of {str(checkpoint.path)!r} are of iteration {iterations}")
        restore(dict(enumerate(self.layers)), self.optimizer, list(payloads.values()))
        first = payloads.get(FILE) or checkpoint.payload(FILE)
        self.history = history_from(first, checkpoint.iteration)
        self.updates = updates
        if checkpoint.manifest["num_ranks"] == 1:
            restore_random_state(first)


def train(config: Config, *, show: bool = False, checkpoints: CheckpointOptions = NO_CHECKPOINTS) -> Training:
    """Trains the monolith for `config.num_iterations`; sets the process's number of threads.

    checkpoints: where it saves what it has done, and whether it goes on from there.
    """
    torch.set_num_threads(config.threads)
    with contextlib.ExitStack() as at_end:
        directory, newest, say = None, None, ""
        if checkpoints.checkpoint_dir is not None:
            directory, newest, say = open_directory(checkpoints, config)
            at_end.callback(directory.close)
        training = Training(config)
        if newest is not None:
            training.load(newest)
        if checkpoints.resume:
            print(say, flush=True)
        with Progress(config.num_iterations, show, done=len(training.losses)) as progress:
            while len(training.losses) < config.num_iterations:
                progress.advance(training.step())
                if due(checkpoints, len(training.losses), config.num_iterations):
                    training.save(directory)
    return training


def result_of(config: Config, training: Training) -> Result:
    """The monolith's result: no schedule, no bubble, nothing sent, one microbatch in flight."""
    test = test_set(config)
    return Result(
        schedule=None,
        num_ranks=1,
        num_stages=1,
        num_microbatches=config.num_microbatches,
        losses=training.losses,
        iteration_seconds=training.history.iteration_seconds,
        test_accuracy=evaluate(training.layers, *test, config.num_microbatches)["accuracy"] if test else None,
        weights_sha256=weights_sha256(training.parameters),
        bubble=None,
        peak_in_flight=[1],
        bytes_sent=[0],
    )
