"""The check cells of the notebooks: right answers are accepted, and wrong ones hear what is wrong with them."""

from pathlib import Path

import pytest

from notebooks import checks, walk
from notebooks.playground import draw, picture, playground
from step6_schedules.schedules import SCHEDULES
from step6_schedules.worksheet import write_empty

SPLIT = ["0F0 0F1 0I0 0F2 0I1 0F3 0I2 0W0 0I3 0W1 0W2 0W3", "1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W1 1W2 1W3"]
ONE_F_ONE_B = [" ".join(map(str, row)) for row in SCHEDULES["1f1b"](2, 4).rows]
CASES = [
    (checks.microbatches, [3, 2, 2], "right: [3, 2, 2]"),
    (checks.microbatches, (2, 3, 2), "not yet: the right sizes in another order; the larger ones come first"),
    (checks.microbatches, [3, 3, 2], "not yet: they add up to 8, and the batch has 7 rows"),
    (checks.microbatches, [3, 4], "not yet: 2 sizes for 3 microbatches"),
    (checks.microbatches, [5, 1, 1], "not yet: they differ by 4; even pieces differ by one row at most"),
    (checks.layers_of_stage, [4, 5, 6], "right: stage 1 has layers 4 to 6"),
    (checks.layers_of_stage, [3, 4, 5], "not yet: as many layers as it should have, but it does not start at layer 3"),
    (checks.layers_of_stage, [4, 6], "not yet: a stage is a contiguous slice, with no layer left out and none twice"),
    (checks.layers_of_stage, [4, 5], "not yet: 2 layers, and stage 1 of an even partition has 3"),
    (checks.layers_of_stage, [], "not yet: 0 layers, and stage 1 of an even partition has 3"),
    (checks.bytes_sent, [512, *[1024] * 6, 512], "right: 7168 bytes in all"),
    (checks.bytes_sent, [1024] * 8, "not yet: rank 0 does not send 1024 bytes; it has nobody to send a gradient to"),
    (checks.bytes_sent, [512] * 8, "not yet: rank 1 does not send 512 bytes; it sends an activation ahead and"),
    (checks.bytes_sent, [512, *[1024] * 7], "not yet: rank 7 does not send 1024 bytes; it has nobody to send an act"),
    (checks.bytes_sent, [512, 512], "not yet: 2 numbers for 8 ranks"),
    (checks.order_of_messages, {0: ["send a0", "send a1", "recv g0"], 1: ["recv a0", "recv a1", "send g0"]}, "right: "),
    (checks.order_of_messages, {0: ["send a0", "recv g0", "send a1"], 1: ["recv a0", "send g0", "recv a1"]}, "right: "),
    (checks.order_of_messages, {0: ["send a0", "send a1", "recv g0"], 1: ["recv a0", "send g0", "recv a1"]},
     "deadlock: rank 0 waits in send a1, rank 1 waits in send g0"),
    (checks.order_of_messages, {0: ["recv g0", "send a0", "send a1"], 1: ["send g0", "recv a0", "recv a1"]},
     "not yet: rank 1 cannot send g0 before it has received a0"),
    (checks.order_of_messages, {0: ["send a0"], 1: []}, "not yet: rank 0 makes the calls recv g0, send a0, send a1"),
    (checks.even_bytes, [3, 2, 3], "right: the largest rank holds 165,376 bytes"),
    (checks.even_bytes, [1, 6, 1], "not yet: your largest rank holds 396,288 bytes; "),
    (checks.even_bytes, [4, 4], "not yet: 3 numbers of at least 1 that add up to 8 layers"),
    (checks.even_bytes, [0, 4, 4], "not yet: 3 numbers of at least 1"),
    (checks.short_table, ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], "right: 9 slots, bubble 0.333, peak in flight [2, 1]"),
    (checks.short_table, ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"], "not yet: legal, but 12 slots long; 9 can be had"),
    (checks.short_table, ["0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"], "not yet: yours: rank 0 cannot run 0B0"),
    (checks.short_table, ["0F0 0B0", "1F0 1B0"], "not yet: 2 ranks and 1 microbatches; it should be 2 and 2"),
    (checks.short_table, ["x"], "not yet: 'x' is not an action such as 2F0"),
    (checks.microbatches_for_bubble, 64, "right: 0.0986 with 64, and 0.1000 with one fewer"),
    (checks.microbatches_for_bubble, 63, "not yet: with 63 microbatches the bubble is 0.1000, which is not below 0.1"),
    (checks.microbatches_for_bubble, 65, "not yet: 65 are enough, but so are 64"),
    (checks.beats_1f1b, SPLIT, "right: a bubble of "),
    (checks.beats_1f1b, ONE_F_ONE_B, "not yet: legal, with a bub"),
    (checks.beats_1f1b, ["0F0 0B0", "1F0 1B0"], "not yet: 2 ranks and 1 microbatches; it should be 2 and 4"),
    (checks.beats_1f1b, ["0W0", "1F0"], "not yet: "),
]  # fmt: skip


@pytest.mark.parametrize(("check", "answer", "said"), CASES)
def test_each_answer_hears_what_is_right_or_wrong_with_it(capsys, check, answer, said):
    check(answer)
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize("check", sorted({check for check, _, _ in CASES}, key=lambda c: c.__name__))
def test_no_answer_yet(capsys, check):
    check(None)
    assert capsys.readouterr().out == f"{checks.NOT_YET}\n"


def test_the_sheet_as_text_and_as_a_file(capsys, tmp_path):
    checks.sheet("0F0, , , 0B0\n, 1F0, 1B0, ", num_microbatches=1)
    assert "this is 1F1B, action by action" in capsys.readouterr().out
    checks.sheet("0F0, , 0B0\n1F0, , 1B0", num_microbatches=1)
    assert "rank 1, slot 0: 1F0 needs the activation of 0F0" in capsys.readouterr().out
    checks.sheet("\n ,,\n")
    assert capsys.readouterr().out == f"{checks.NOT_YET}\n"
    write_empty(tmp_path / "s.csv", 2, 1)
    checks.sheet(tmp_path / "s.csv", num_microbatches=1)
    assert "rank 0: missing 0F0 0B0" in capsys.readouterr().out
    checks.sheet(Path("not there.csv"))
    assert capsys.readouterr().out.startswith("not yet: 'not there.csv' cannot be read")


@pytest.mark.parametrize(
    ("mine", "found", "said"),
    [
        (None, 0.2727, "it: 0.2727 (no guess yet: write a number into the cell above)"),
        (0.273, 3 / 11, "it: 0.2727 (you said 0.273, right)"),
        (0.3, 3 / 11, "it: 0.2727 (you said 0.3, not quite)"),
        (0, 0.0, "it: 0 (you said 0, right)"),
        (32768, 32768, "it: 32,768 (you said 32768, right)"),
    ],
)
def test_a_guess_is_held_against_the_number(capsys, mine, found, said):
    walk.guess("it", mine, found)
    assert capsys.readouterr().out == said + "\n"


TORCHRUNS = [
    "W1201 08:07:56.255000 9152 torch/distributed/run.py:803] notice",
    "Traceback (most recent call last):", '  File "run.py", line 1', "torch...errors.ChildFailedError: ",
    "============", "  time      : 2026-12-01", "============",
]  # fmt: skip
EARLY = ["Traceback (most recent call last):", '  File "mine.py", line 3', "ImportError: no mine"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (["a", *TORCHRUNS], ["a"]),
        (["a", *EARLY, *TORCHRUNS], ["a", *EARLY]),
        (["a", *EARLY, "b"], ["a", *EARLY, "b"]),
        ([f"[rank1]: {line}" for line in EARLY] + TORCHRUNS, [f"[rank1]: {line}" for line in EARLY]),
    ],
)
def test_all_lines_are_shown_but_torchruns_own(written, shown):
    lines = walk._Lines(False)
    assert [line for each in written for line in lines.take(each)] + lines.rest() == shown
    lines = walk._Lines(True)
    assert [line for each in written for line in lines.take(each)] + lines.rest() == written


# The playground


def test_a_picture_or_the_reason_why_there_is_none():
    said, data = picture("1f1b", 4, 8)
    assert said == "1f1b: makespan 33, bubble 0.273, in flight at most 4 3 2 1"
    assert data[:4] == b"\x89PNG"
    assert picture("zb-v", chunks=1) == (picture("zb-v", chunks=1)[0], None)
    assert picture("zb-v", chunks=1)[0].startswith("no such table: --num-chunks 1: zb-v has 2 chunks a rank")
    assert picture("1f1b", B=1.0, W=1.0)[0].startswith("no such table: B=1 is a whole backward and must be longer")
    assert picture("interleaved", chunks=4)[0].startswith("interleaved: makespan 26.25, ")


def test_the_sliders_redraw_the_picture(monkeypatch):
    """Turned from Python, as a browser would turn them."""
    shown = []

    class Handle:
        def update(self, image):
            shown.append(image.data)

    monkeypatch.setattr("IPython.display.display", lambda *things, **more: Handle() if "display_id" in more else None)
    box = playground()
    assert len(shown) == 1
    assert box.label.value == "1f1b: makespan 33, bubble 0.273, in flight at most 4 3 2 1"
    box.controls["microbatches"].value = 16
    assert box.label.value.startswith("1f1b: makespan 57, ")
    box.controls["schedule"].value = "zb-v"
    assert box.controls["chunks"].value == 2  # a schedule brings its chunks
    assert box.label.value.startswith("zb-v: makespan ")
    count = len(shown)
    box.controls["chunks"].value = 1
    assert box.label.value.startswith("no such table: ")
    assert len(shown) == count  # the last picture stays


def test_without_widgets_it_draws_once_and_says_how_to_go_on(monkeypatch, capsys):
    drawn = []
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    monkeypatch.setattr("IPython.display.display", drawn.append)
    assert playground() is None
    assert "ipywidgets is not installed: no sliders; call draw('zb-h1'" in capsys.readouterr().out
    draw("zb-h1", ranks=2, microbatches=3)
    assert len(drawn) == 2
