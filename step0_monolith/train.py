"""Training the whole model in one process."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from step0_monolith.config import Config
from step0_monolith.data import batch, test_set
from step0_monolith.model import Layer, layers
from step0_monolith.options import Options, option, optional, output_file
from step0_monolith.progress import Progress
from step0_monolith.reference import evaluate, forward_backward
from step0_monolith.result import Result, weights_sha256
from step0_monolith.update import make_optimizer, norm_of, squared_norms, step


@dataclass(frozen=True)
class ResultOptions(Options):
    """Where a run writes what it did."""

    result: Path | None = option(None, optional(output_file(".json")), "file for the result, a JSON object")


@dataclass
class Trained:
    """The trained layers, the loss of each iteration and its seconds."""

    layers: list[Layer]
    losses: list[float] = field(default_factory=list)
    iteration_seconds: list[float] = field(default_factory=list)


def train(config: Config, *, show: bool = False) -> Trained:
    """Trains the monolith for `config.num_iterations`; sets the process's number of threads."""
    torch.set_num_threads(config.threads)
    trained = Trained(layers(config))
    parameters = [p for layer in trained.layers for p in layer.parameters()]
    optimizer = make_optimizer(config, parameters)
    with Progress(config.num_iterations, show) as progress:
        for iteration in range(config.num_iterations):
            start = time.perf_counter()
            inputs, targets = batch(config, iteration)
            optimizer.zero_grad()
            loss = forward_backward(
                trained.layers, inputs, targets, config.num_microbatches, seed=config.seed, iteration=iteration
            )
            norm = None if config.max_grad_norm is None else norm_of(squared_norms(parameters))
            step(config, optimizer, iteration, norm)
            trained.losses.append(loss.item())
            trained.iteration_seconds.append(time.perf_counter() - start)
            progress.advance(trained.losses[-1])
    return trained


def result_of(config: Config, trained: Trained) -> Result:
    """The monolith's result: no schedule, no bubble, nothing sent, one microbatch in flight."""
    test = test_set(config)
    return Result(
        schedule=None,
        num_ranks=1,
        num_stages=1,
        num_microbatches=config.num_microbatches,
        losses=trained.losses,
        iteration_seconds=trained.iteration_seconds,
        test_accuracy=evaluate(trained.layers, *test, config.num_microbatches)["accuracy"] if test else None,
        weights_sha256=weights_sha256(p for layer in trained.layers for p in layer.parameters()),
        bubble=None,
        peak_in_flight=[1],
        bytes_sent=[0],
    )
