"""The search behind auto (being built): the best of the published tables."""

from step5_orchestrator.prediction import makespan


def search(wanted, candidates):
    """Rows of the best candidate."""
    return min(candidates, key=lambda table: makespan(table, wanted.cost)).rows
