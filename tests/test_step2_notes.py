"""Step 2: from the ranks' notes to the one that holds up the others."""

import pytest

from step2_comms.notes import Note, chain, explain


def waits(rank, peer, call=None):
    return Note(rank, "waits", call or f"recv from rank {peer}", peer)


def busy(rank):
    return Note(rank, "busy", "2F3", where="stage.py:40", seconds=61.2)


def notes(*given):
    return {note.rank: note for note in given}


@pytest.mark.parametrize(
    ("given", "start", "num_ranks", "expected"),
    [
        pytest.param(
            notes(waits(0, 1), waits(1, 2), busy(2)),
            0,
            3,
            "rank 2 is alive but has been busy for 61 s while in 2F3 at stage.py:40; "
            "rank 0 waits in recv from rank 1; rank 1 waits in recv from rank 2",
            id="chain to a busy rank",
        ),
        pytest.param(
            notes(waits(0, 1), Note(1, "failed", error="ValueError: x")),
            0,
            2,
            "rank 1 failed: ValueError: x; rank 0 waits in recv from rank 1",
            id="failed",
        ),
        pytest.param(
            notes(waits(0, 1), Note(1, "left", "3F0")),
            0,
            2,
            "rank 1 left before its work was done while in 3F0; rank 0 waits in recv from rank 1",
            id="left",
        ),
        pytest.param(
            notes(waits(0, 1), Note(1, "finished")),
            0,
            2,
            "rank 1 has finished; rank 0 waits in recv from rank 1",
            id="finished",
        ),
        pytest.param(
            notes(waits(0, 1)),
            0,
            2,
            "rank 1 does not answer: killed, stopped or gone; rank 0 waits in recv from rank 1",
            id="no note",
        ),
        pytest.param(
            notes(waits(0, 1), Note(1, "silent")),
            0,
            2,
            "rank 1 does not answer: killed, stopped or gone; rank 0 waits in recv from rank 1",
            id="found silent by another rank",
        ),
        pytest.param(
            notes(waits(0, 1), waits(1, 0)),
            1,
            2,
            # Whoever asks, the lowest rank of the circle comes first.
            "deadlock: rank 0 waits in recv from rank 1, rank 1 waits in recv from rank 0",
            id="circle of two",
        ),
        pytest.param(
            notes(waits(0, 1), waits(1, 2), waits(2, 3), waits(3, 1)),
            0,
            4,
            "deadlock: rank 1 waits in recv from rank 2, rank 2 waits in recv from rank 3, "
            "rank 3 waits in recv from rank 1; rank 0 waits in recv from rank 1",
            id="a circle that the asker is not part of",
        ),
        pytest.param(
            notes(waits(1, 0), Note(2, "failed", error="ValueError: x")),
            1,
            3,
            "rank 2 failed: ValueError: x; rank 0 does not answer: killed, stopped or gone; "
            "rank 1 waits in recv from rank 0",
            id="a silent rank, and one that failed by itself",
        ),
        pytest.param(
            notes(busy(0)), 0, 2, "rank 0 is alive but has been busy for 61 s while in 2F3 at stage.py:40", id="itself"
        ),
    ],
)
def test_the_root_and_the_way_to_it(given, start, num_ranks, expected):
    assert explain(given, start, num_ranks) == expected


ALL = Note(0, "waits", "gather", None)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([Note(1, "finished"), busy(2), waits(3, 2)], "rank 2 is alive but has been busy for 61 s"),
        ([Note(1, "finished"), busy(2)], "rank 3 does not answer"),
        ([busy(1), Note(3, "left")], "rank 3 left before its work was done"),
        ([Note(1, "left"), busy(2), Note(3, "failed", error="E: x")], "rank 3 failed: E: x"),
        ([Note(1, "finished"), busy(2), Note(3, "finished")], "rank 2 is alive but has been busy for 61 s"),
        ([Note(1, "finished"), Note(2, "waits", "gather"), Note(3, "waits", "gather")], "rank 1 has finished"),
        ([Note(r, "waits", "gather") for r in (1, 2, 3)], "all ranks wait in gather"),
        (
            [Note(1, "waits", "gather"), Note(2, "waits", "gather"), Note(3, "waits", "broadcast from rank 0", 0)],
            "deadlock: rank 0 waits in gather, rank 3 waits in broadcast from rank 0",
        ),
        (
            [Note(1, "waits", "barrier"), Note(2, "waits", "gather"), Note(3, "waits", "gather")],
            "deadlock: rank 0 waits in gather, rank 1 waits in barrier",
        ),
    ],
)
def test_whom_a_rank_that_waits_for_all_waits_for(others, expected):
    assert explain(notes(ALL, *others), 0, 4).startswith(expected)


def test_chain_ends_at_the_first_rank_without_a_note():
    assert chain(notes(waits(0, 1), waits(1, 2)), 0, 4) == [0, 1, 2]
    assert chain(notes(waits(0, 1), waits(1, 0)), 0, 2) == [0, 1, 0]
    assert chain(notes(busy(0)), 0, 2) == [0]


def test_a_note_survives_the_store():
    note = Note(3, "waits", "recv (2F3, 'x')", 1, "a.py:4", 0.25)
    assert Note.from_json(note.to_json()) == note
