"""Fixtures that all steps share: the pool of ranks, and the monolith that everything is compared with."""

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="session")
def pool():
    """Ranks that stay alive: `pool.run(4, function, ...)` calls `function(world, ...)` on each of 4."""
    ranks = Pool()
    yield ranks
    ranks.close()
