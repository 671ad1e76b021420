"""The same function over many cases, on all cores: for slow tests that only compute."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

PIECES_A_CORE = 6  # so that one core does not wait long for the other


def on_all_cores(function: Callable[[list], list], cases: Sequence) -> list:
    """The lists that `function` returns for pieces of `cases`, joined; cases are mixed, so that pieces take alike."""
    cores = os.cpu_count() or 1
    pieces = [list(cases[start :: cores * PIECES_A_CORE]) for start in range(cores * PIECES_A_CORE)]
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("forkserver")) as processes:
        return [found for part in processes.map(function, [piece for piece in pieces if piece]) for found in part]
