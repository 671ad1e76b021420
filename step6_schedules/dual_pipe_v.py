"""DualPipe in V form: forwards and backwards in pairs, so that each can hide the other's messages."""

from itertools import pairwise

from step5_orchestrator.table import Table, TableError, make_table
from step5_orchestrator.words import counted
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
            f"dualpipe-v needs at least twice as many microbatches as ranks: {2 * P} for {counted(P, 'rank')}, not {M}"
        )
    rows, pairs = [], []
    for rank in range(P):
        # The sixth phase has rank + 1 rounds; from its middle on, backwards are split.
        rounds, is_odd = divmod(rank + 1, 2)
        row = v_row(
            rank,
            P,
            M,
            (2 * (P - 1 - rank), "Fa"),  # 1: forwards go down to the last rank
            (rank + 1, "Fa Fb"),  # 2: and come up again
            (P - 1 - rank, "Ib W Fb"),  # 3: the first gradients; I at once, W while the rank waits
            (M - 2 * P + rank + 1, "Fa Bb Fb Ba"),  # 4: steady, in pairs
            (P - 1 - rank, "Bb Fb Ba"),  # 5: chunk a has no forward left
            (rounds, "Bb Ba"),  # 6: no chunk has
            (is_odd, "Bb Ia"),
            (rounds, "Ib Ia"),
            (P - 1 - rank, "W Ia"),  # 7: the last gradients of chunk a, with W in between
            (rank + 1, "W"),  # 8
        )
        rows.append(row)
        paired = [action for action, following in pairwise(row) if action.op == "F" and following.op == "B"]
        # The last rank's first forward is what all others wait for: mixed with a backward it would come later.
        pairs += paired[1:] if rank == P - 1 else paired
    return make_table("dualpipe-v", rows, pairs)
