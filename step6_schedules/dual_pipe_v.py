"""DualPipe in V form: forwards and backwards in pairs, so that each can hide the other's messages."""

from itertools import pairwise

from step5_orchestrator.table import Table, TableError, make_table
from step6_schedules.phases import v_row


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Table:
    """Rank r has stages r and 2P-1-r; eight phases; makespan 6M+P-1 slots for F=I=W=1 with each pair in sequence.

    At most 2P+1 chunk activations in flight on every rank. Backwards are split only where W fills what would be idle:
    while the pipeline fills, and from the middle of the sixth phase on. Raises TableError for M < 2P: each rank's
    phases reach 2P forwards ahead. Source: DeepSeek-AI, arXiv 2412.19437, section 3.2.1, and the authors' published
    schedule in V form.
    """
    P, M = num_ranks, num_microbatches
    if M < 2 * P:
        raise TableError(
            f"dualpipe-v needs at least twice as many microbatches as ranks: {2 * P} for {P} ranks, but there are {M}"
        )
    rows, pairs = [], []
    for rank in range(P):
        whole, odd = divmod(rank + 1, 2)
        row = v_row(
            rank,
            P,
            M,
            (2 * (P - 1 - rank), "F0"),
            (rank + 1, "F0 F1"),
            (P - 1 - rank, "I1 W F1"),
            (M - 2 * P + rank + 1, "F0 B1 F1 B0"),
            (P - 1 - rank, "B1 F1 B0"),
            (whole, "B1 B0"),
            (odd, "B1 I0"),
            (whole, "I1 I0"),
            (P - 1 - rank, "W I0"),
            (rank + 1, "W"),
        )
        rows.append(row)
        paired = [action for action, following in pairwise(row) if action.op == "F" and following.op == "B"]
        # The last rank's first forward is what all others wait for: mixed with a backward it would come later.
        pairs += paired[1:] if rank == P - 1 else paired
    return make_table("dualpipe-v", rows, pairs)
