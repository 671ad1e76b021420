"""Fixtures that all steps share: the pool of ranks, and the monolith that everything is compared with."""

import pytest
import torch

from tests.ranks import Pool, end_helpers

pytest_plugins = ["tests.scoreboard"]


# As in every rank: the number of threads can change the last bits of what a test compares ranks with.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_helper_is_left():
    yield
    end_helpers()


@pytest.fixture(scope="session")
def pool(no_helper_is_left):
    """Ranks that stay alive: `pool.run(4, function, ...)` calls `function(world, ...)` on each of 4."""
    ranks = Pool()
    yield ranks
    ranks.close()
