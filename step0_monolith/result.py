"""The result file: what a run did, in one JSON object, the same for the monolith and for every pipeline."""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from step0_monolith.files import write_whole


def raw_bytes(tensor: Tensor) -> bytes:
    """The tensor's elements as contiguous little-endian bytes, any dtype."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weights_sha256(parameters: Iterable[Tensor]) -> str:
    """SHA-256 of all parameters, in layer order, weight then bias, in their own dtype."""
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(raw_bytes(parameter))
    return digest.hexdigest()


@dataclass
class Result:
    """The fields of `--result`.

    schedule: None for the monolith. losses: one an iteration, the mean over the whole batch. iteration_seconds: wall
    time of each. test_accuracy: 0..1, None for random data. bubble: {"predicted", "measured"}, idle share of ranks x
    makespan, None for the monolith. peak_in_flight: a rank, chunk activations held at once. bytes_sent: a rank,
    payload of one iteration.
    """

    schedule: str | None
    num_ranks: int
    num_stages: int
    num_microbatches: int
    losses: list[float]
    iteration_seconds: list[float]
    test_accuracy: float | None
    weights_sha256: str
    bubble: dict[str, float] | None
    peak_in_flight: list[int]
    bytes_sent: list[int]

    def write(self, path: Path) -> None:
        """Writes the JSON object, whole or not at all; a loss that is not finite becomes null, as JSON has no NaN."""
        fields = asdict(self)
        fields["losses"] = [loss if math.isfinite(loss) else None for loss in self.losses]
        text = json.dumps(fields, indent=1, allow_nan=False) + "\n"
        write_whole(path, lambda temporary: temporary.write_text(text))


def read_result(path: Path) -> Result:
    """Reads a result file back."""
    return Result(**json.loads(path.read_text()))
