"""torchrun --standalone --nproc-per-node 1 -m step6_schedules.measure.actions: what Python adds to an action.

One rank and no messages: this course's pipeline, torch.distributed.pipelining, and the arithmetic alone, on the same
weights, microbatches and table. What the first two take more than the third is what they add. That does not depend on
how many layers an action has, and is seen the better the fewer there are: four, as on each of 4 ranks at this width.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from step0_monolith.data import batch, microbatches
from step0_monolith.loss import batch_weight, loss_share
from step0_monolith.options import Options, option, parse, run_program, whole
from step1_partition.stage import Stage
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step4_sharded.shard import shard
from step6_schedules.measure.contestants import Library, Ours
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.program import MeasureOptions, chosen_from, config_of, save
from step6_schedules.measure.rounds import Samples, others, spread, take_turns

PROGRAM = "step6_schedules.measure.actions"
OURS, LIBRARYS, ARITHMETIC = "ours", "library", "arithmetic"
NAMES = ("1f1b", "interleaved")
# Differences of some ten microseconds show in many short turns, which a passing disturbance spoils one by one.
SHORT_TURNS, TURN_SECONDS = 20, 0.02
GOAL = 0.5


@dataclass(frozen=True)
class ActionOptions(Options):
    """What runs."""

    schedules: tuple[str, ...] = option(NAMES, chosen_from(NAMES), "schedules to measure, with one chunk and with two")
    num_layers: int = option(4, whole(2, 10_000), "layers of each action")


class Arithmetic:
    """One batch, microbatch by microbatch: layers, loss and backward, and nothing else; cut where the stages are."""

    def __init__(self, stages: Sequence[Stage], inputs: Tensor, targets: Tensor, num_microbatches: int) -> None:
        self.parameters = [parameter for stage in stages for parameter in stage.parameters()]
        self._stages = [stage.modules for stage in stages]
        pieces = microbatches(inputs, num_microbatches), microbatches(targets, num_microbatches)
        self._batch, self._weight = list(zip(*pieces, strict=True)), batch_weight(targets)

    def __call__(self) -> None:
        """Adds the batch's gradients."""
        for inputs, targets in self._batch:
            y, cuts = inputs, []
            for number, layers in enumerate(self._stages):
                x = y.detach().requires_grad_() if number else y
                y = x
                for layer in layers:
                    y = layer(y)
                cuts.append((x, y))
            cuts[-1] = x, loss_share(y, targets, self._weight)
            gradient = None
            for x, y in reversed(cuts):
                torch.autograd.backward(y, gradient)
                gradient = x.grad


def without_gradients(parameters: Sequence[nn.Parameter], run: Callable[[], object]) -> None:
    """Runs it with all gradients None before."""
    for parameter in parameters:
        parameter.grad = None
    run()


def added(samples: Samples, who: str, num_actions: int) -> list[float]:
    """Seconds an action that one takes more than the arithmetic, round by round."""
    pairs = zip(samples[who], samples[ARITHMETIC], strict=True)
    return [(sample.seconds - alone.seconds) / num_actions for sample, alone in pairs]


def figure(samples: Samples, num_actions: int, case: str) -> Figure:
    """What ours adds over what the library adds; a round in which the library seems to add nothing says nothing."""
    ours, librarys = added(samples, OURS, num_actions), added(samples, LIBRARYS, num_actions)
    shares = [a / b for a, b in zip(ours, librarys, strict=True) if b > 0]
    alone = [sample.seconds / num_actions for sample in samples[ARITHMETIC]]
    micros = {"ours adds": ours, "library adds": librarys, "arithmetic": alone}
    micros = {f"{name}, us": [1e6 * value for value in values] for name, values in micros.items()}
    return Figure(
        "Python per action, ours / library",
        case,
        **of_spread(spread(shares or [float("nan")])),
        goal=GOAL,
        others=others(samples),
        beside={name: statistics.median(values) for name, values in micros.items()},
        samples=micros,
    )


def measure(world: World, name: str, size: str, num_layers: int, rounds: int) -> Figure:
    """The figure of one schedule."""
    num_chunks = 1 if name == "1f1b" else 2
    config = replace(config_of(size), num_layers=num_layers * num_chunks)
    library = Library(name, config, world)
    table = library.table(name, 1, config.num_microbatches)
    ours = Ours(config, world, table)
    inputs, targets = (x.to(world.device) for x in batch(config, 0))
    alone = [shard(config, num_chunks, index, None, world.device) for index in range(num_chunks)]
    arithmetic = Arithmetic(alone, inputs, targets, config.num_microbatches)
    parameters = [[p for stage in who.stages for p in stage.parameters()] for who in (ours, library)]
    contestants = {
        OURS: partial(
            without_gradients, parameters[0], partial(ours.trainer.pipeline.forward_backward, inputs, targets)
        ),
        LIBRARYS: partial(
            without_gradients, parameters[1], partial(library.schedule.step, inputs, target=targets, losses=[])
        ),
        ARITHMETIC: partial(without_gradients, arithmetic.parameters, arithmetic),
    }
    samples = take_turns(world, contestants, rounds=rounds * SHORT_TURNS, turn_seconds=TURN_SECONDS)
    ours.close()
    return figure(samples, len(table.rows[0]), f"{name}, {size}, {num_layers} layers an action")


def main() -> None:
    """Measures one schedule after another."""
    takes = {MeasureOptions: None, ActionOptions: None, WorldOptions: ["device", "timeout"]}
    options, chosen, world_options = parse(torchrun_command(PROGRAM, 1), __doc__, takes)
    launch = read_launch(PROGRAM, at_most=1)
    with open_world(launch, world_options) as world:
        figures = [measure(world, name, options.size, chosen.num_layers, options.rounds) for name in chosen.schedules]
    save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
