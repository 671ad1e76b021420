"""Every size of a run, in one frozen dataclass that is checked once; the command line is made from it."""

from dataclasses import dataclass

import torch

from step0_monolith.options import Options, UsageError, number, one_of, option, optional, whole

NUM_FEATURES = 64
NUM_CLASSES = 10
NUM_TRAIN_ROWS = 1437
NUM_TEST_ROWS = 360
DEFAULT_LEARNING_RATE = {"sgd": 0.1, "adam": 0.001}


@dataclass(frozen=True)
class Config(Options):
    """What to train, on what, and how long.

    Raises UsageError for any value that makes no sense alone or together with the others.
    """

    num_layers: int = option(8, whole(1, 10_000), "linear layers of the model")
    width: int = option(128, whole(1, 1_000_000), "features between two layers")
    batch_size: int = option(64, whole(1, 10_000_000), "rows in a batch")
    num_microbatches: int = option(8, whole(1), "pieces that each batch is cut into")
    num_iterations: int = option(300, whole(1), "batches to train on, each followed by a step of the optimizer")
    seed: int = option(0, whole(0), "seed of the initial weights and of the order of the rows")
    learning_rate: float = option(
        None,
        optional(number(above=0, at_most=1e38)),
        "step size of the optimizer (default: 0.1 for sgd, 0.001 for adam)",
    )
    optimizer: str = option("sgd", one_of("sgd", "adam"), "which optimizer")
    lr_schedule: str = option(
        "constant",
        one_of("constant", "warmup-cosine"),
        "how the step size changes: not at all, or up and then down to 0",
    )
    warmup_iterations: int = option(0, whole(0), "iterations of warmup-cosine in which the step size still grows")
    max_grad_norm: float | None = option(
        None,
        optional(number(above=0)),
        "norm of all gradients together above which they are shortened (default: no limit)",
    )
    accumulate: int = option(
        1, whole(1, 1_000_000), "iterations whose gradients are added up before each step of the optimizer"
    )
    on_nonfinite: str = option(
        "stop",
        one_of("stop", "skip"),
        "what to do when a loss or a gradient is no finite number: end the run, or leave that update out",
    )
    data: str = option("digits", one_of("digits", "random"), "real handwritten digits, or random rows for measuring")
    dtype: str = option("float32", one_of("float32", "float64", "bfloat16"), "type of weights and activations")
    threads: int = option(1, whole(1, 1024), "threads a process; their number can change the last bits")

    def check_together(self) -> None:
        """Fills in the learning rate, and refuses sizes that do not fit together."""
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", DEFAULT_LEARNING_RATE[self.optimizer])
        if self.warmup_iterations and self.lr_schedule == "constant":
            raise UsageError(f"--warmup-iterations {self.warmup_iterations} needs --lr-schedule warmup-cosine")
        if self.warmup_iterations > self.num_iterations:
            raise UsageError(
                f"--warmup-iterations {self.warmup_iterations} is more than the {self.num_iterations} of the run"
            )
        if self.num_microbatches > self.batch_size:
            raise UsageError(
                f"--num-microbatches {self.num_microbatches} is more than the {self.batch_size} rows of a batch; "
                f"lower it or raise --batch-size"
            )
        if self.data == "digits" and self.batch_size > NUM_TRAIN_ROWS:
            raise UsageError(f"--batch-size {self.batch_size} is more than the {NUM_TRAIN_ROWS} training rows")
        if self.data == "digits" and self.batch_size * self.accumulate > NUM_TRAIN_ROWS:
            raise UsageError(
                f"--accumulate {self.accumulate} times --batch-size {self.batch_size} is more than the "
                f"{NUM_TRAIN_ROWS} training rows"
            )
        if self.batch_size * self.accumulate > 10_000_000:
            raise UsageError(
                f"--accumulate {self.accumulate} times --batch-size {self.batch_size} is more than 10,000,000 rows"
            )
        for flag, value in (("num-iterations", self.num_iterations), ("warmup-iterations", self.warmup_iterations)):
            if value % self.accumulate:
                raise UsageError(
                    f"--{flag} {value} is not a multiple of --accumulate {self.accumulate}, so that the last "
                    f"{value % self.accumulate} would not make an update"
                )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        return getattr(torch, self.dtype)

    def shape_of_layer(self, index: int) -> tuple[int, int]:
        """(input features, output features) of layer `index`."""
        first, last = index == 0, index == self.num_layers - 1
        return (NUM_FEATURES if first else self.width, NUM_CLASSES if last else self.width)
