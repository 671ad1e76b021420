"""The two data sets: real handwritten digits, and seeded random rows for measuring."""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from step0_monolith.config import NUM_CLASSES, NUM_FEATURES, NUM_TRAIN_ROWS, Config
from step0_monolith.seeds import generator_for


def _rows_of_digits() -> np.ndarray:
    """Each image's 64 pixels and its label, (1797, 65), from the file that scikit-learn has."""
    # Read as load_digits does, without importing the library, which takes each process fifty times as long.
    file = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The 1797 images of scikit-learn's digits, split once and for all.

    Returns training images (1437, 64), training labels (1437,), test images (360, 64), test labels (360,). Images are
    float64, each pixel standardised by the training rows' mean and deviation (a constant pixel becomes 0).
    """
    rows = torch.from_numpy(_rows_of_digits())
    images, labels = rows[:, :-1].contiguous(), rows[:, -1].long()
    order = torch.randperm(len(images), generator=generator_for(0, "split"))
    train, test = order[:NUM_TRAIN_ROWS], order[NUM_TRAIN_ROWS:]
    mean, deviation = images[train].mean(0), images[train].std(0)
    images = (images - mean) / torch.where(deviation > 0, deviation, 1.0)
    return images[train], labels[train], images[test], labels[test]


@lru_cache(maxsize=2)
def _order_of_epoch(seed: int, epoch: int) -> Tensor:
    return torch.randperm(NUM_TRAIN_ROWS, generator=generator_for(seed, "epoch", epoch))


@lru_cache(maxsize=2)
def _random_rows(seed: int, update: int, num_rows: int) -> tuple[Tensor, Tensor]:
    generator = generator_for(seed, "batch", update)
    inputs = torch.randn(num_rows, NUM_FEATURES, generator=generator)
    return inputs, torch.randint(NUM_CLASSES, (num_rows,), generator=generator)


def batch(config: Config, iteration: int, replica: int = 0, num_replicas: int = 1) -> tuple[Tensor, Tensor]:
    """The batch of one iteration: inputs (batch_size, 64) in the run's dtype and labels (batch_size,).

    Depends on the seed and the iteration alone, so that any process can ask for any batch at any time. Each epoch has
    its own order; the rows that do not fill a last batch are left out of that epoch. Where several iterations make one
    update (`accumulate`), their batches are the pieces of the batch that is so many times as large. With replicas each
    has its own piece of the batch.
    """
    update, part = divmod(iteration, config.accumulate)
    pieces = torch.arange(config.batch_size).tensor_split(num_replicas)
    own = pieces[replica] + part * config.batch_size
    rows_an_update = config.batch_size * config.accumulate
    if config.data == "random":
        inputs, labels = _random_rows(config.seed, update, rows_an_update)
        return inputs[own].to(config.torch_dtype), labels[own]
    epoch, position = divmod(update, NUM_TRAIN_ROWS // rows_an_update)
    rows = _order_of_epoch(config.seed, epoch)[own + position * rows_an_update]
    inputs, labels, _, _ = digits()
    return inputs[rows].to(config.torch_dtype), labels[rows]


def test_set(config: Config) -> tuple[Tensor, Tensor] | None:
    """Test inputs (360, 64) in the run's dtype and labels (360,); None for random data, which has nothing to learn."""
    if config.data == "random":
        return None
    _, _, inputs, labels = digits()
    return inputs.to(config.torch_dtype), labels


def microbatches(rows: Tensor, num_microbatches: int) -> tuple[Tensor, ...]:
    """Cuts a batch into microbatches whose sizes differ by at most one row (8 rows in 5: 2, 2, 2, 1, 1)."""
    # tensor_split, not chunk: chunk may give fewer pieces than asked for (8 rows in 5 gives 4).
    return torch.tensor_split(rows, num_microbatches)


def microbatch_sizes(num_rows: int, num_microbatches: int) -> list[int]:
    """Rows of each microbatch, without looking at data."""
    return [len(piece) for piece in microbatches(torch.empty(num_rows, 0), num_microbatches)]
