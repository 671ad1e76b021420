"""Step 6: schedules compared, and the advice that is made from the numbers."""

import itertools
import json
import random
import re

import pytest
from matplotlib.text import Text

from step0_monolith.options import UsageError
from step5_orchestrator.costs import costs
from step6_schedules.advice import EPSILON, LOW, Compared, advise, beaten_by, choice_of
from step6_schedules.compare import CompareOptions, Comparison, as_json, as_text, compare
from step6_schedules.compare_figure import comparison_figure
from step6_schedules.schedules import SCHEDULES
from tests.ranks import python


def numbers(**options) -> tuple[Comparison, dict[str, Compared]]:
    comparison = compare(CompareOptions(**options))
    return comparison, {each.name: each for each in comparison.found}


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (8, 3), (8, 32)])
def test_known_bubbles_and_peaks(p, m):
    comparison, found = numbers(num_ranks=p, num_microbatches=m)
    assert set(found) | set(comparison.impossible) == set(SCHEDULES)
    for name in ("gpipe", "1f1b"):
        assert found[name].bubble == pytest.approx((p - 1) / (m + p - 1))
    assert found["naive"].bubble == pytest.approx(1 - 1 / p)
    assert (found["naive"].memory, found["gpipe"].memory, found["1f1b"].memory) == (1, m, min(p, m))
    if m % p == 0:  # two chunks halve what is idle
        assert found["interleaved"].bubble == pytest.approx((p - 1) / (2 * m + p - 1))
    if m >= p > 1:  # 2 P chunks of half a rank's layers
        assert found["zb-v"].memory == p
    for each in found.values():  # the same work in all
        assert each.makespan * (1 - each.bubble) == pytest.approx(3 * m)


def test_costs_are_those_of_all_layers_of_a_rank():
    _, found = numbers(num_ranks=4, num_microbatches=8, cost=costs(5.0, 7.0))
    assert all(each.makespan * (1 - each.bubble) == pytest.approx(8 * 12) for each in found.values())


SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 16)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_advice_holds_for_any_choice_of_schedules(p, m):
    """What is said is looked up again in the numbers, by comparing every pair."""
    draw = random.Random(f"{p} {m}")
    comparison, found = numbers(num_ranks=p, num_microbatches=m)
    for _ in range(12):
        some = draw.sample(list(found.values()), draw.randint(1, len(found)))
        cap = draw.choice([None, None, 0.5, 1, 2, 3.5, 8])
        assert_right(advise(some, cap, comparison.curves), some, cap, comparison.curves)


def assert_right(advice: str, some: list[Compared], cap, curves) -> None:
    by_name = {each.name: each for each in some}
    chosen = choice_of(some, cap)
    limit = cap if cap is not None else by_name["1f1b"].memory if "1f1b" in by_name else float("inf")
    allowed = [each for each in some if each.memory <= limit + EPSILON]
    if not allowed:
        least = min(each.memory for each in some)
        assert advice.endswith(f" needs the least, {least:g}.")
        assert chosen is None
        return
    assert advice.startswith(f"Choose {chosen.name}: its bubble of {chosen.bubble:.3f} is the smallest")
    assert chosen in allowed
    assert all(chosen.bubble <= each.bubble + EPSILON for each in allowed)
    assert not any(beaten_by(chosen, [each]) for each in allowed)
    if match := re.search(r"With room for ([\d.]+), (\S+) brings it to ([\d.]+)\.", advice):
        best = by_name[match[2]]
        assert (f"{best.memory:g}", f"{best.bubble:.3f}") == (match[1], match[3])
        assert best.memory > limit
        assert all(best.bubble <= each.bubble + EPSILON for each in some)
    else:
        assert min(each.bubble for each in some) >= chosen.bubble - EPSILON
    assert ("splits the backward" in advice) == chosen.splits
    curve = dict(curves[chosen.name])
    if match := re.search(r"From (\d+) microbatches on", advice):
        assert all(
            (bubble < LOW) == (count >= int(match[1])) for count, bubble in curve.items() if count >= int(match[1])
        )
        assert any(bubble >= LOW for count, bubble in curve.items() if count < int(match[1]))
    else:
        assert "stays above" in advice or all(bubble < LOW for bubble in curve.values())


@pytest.mark.parametrize("asked", [5, 27, 28, 40])
def test_the_number_of_microbatches_named_does_not_depend_on_the_one_asked_for(asked):
    assert "From 28 microbatches on" in numbers(schedules="1f1b", num_microbatches=max(asked, 16))[0].advice


def test_a_bubble_of_exactly_a_tenth_is_not_below_it():
    curve = {"1f1b": [(26, 3 / 29), (27, 3 / 30), (28, 3 / 31)]}
    one = Compared("1f1b", 1, False, 93.0, 3 / 31, 4)
    assert "From 28 microbatches on its bubble is below 0.1." in advise([one], None, curve)


def test_what_beats_what_is_what_every_pair_says():
    _, found = numbers(num_ranks=4, num_microbatches=8)
    better: dict[str, set[str]] = {name: set() for name in found}
    for a, b in itertools.permutations(found.values(), 2):
        no_worse = a.bubble <= b.bubble + EPSILON and a.memory <= b.memory + EPSILON
        if no_worse and (a.bubble < b.bubble - EPSILON or a.memory < b.memory - EPSILON):
            better[b.name].add(a.name)
    for name, each in found.items():
        found_by = beaten_by(each, list(found.values()))
        assert (found_by is None) == (not better[name])
        assert found_by is None or found_by.name in better[name]
    assert better["gpipe"] >= {"1f1b", "zb-v"}
    assert better["naive"] == better["zb-v"] == set()


def test_a_schedule_that_cannot_have_the_size_is_said_so_and_the_others_go_on():
    comparison, found = numbers(num_ranks=4, num_microbatches=4)
    assert "dualpipe-v" not in found
    assert "not possible: dualpipe-v needs at least twice as many microbatches as ranks" in as_text(comparison)
    only = compare(CompareOptions(schedules="dualpipe-v", num_ranks=4, num_microbatches=4))
    assert only.advice == "None of these schedules can have this size."
    comparison_figure(only)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedules": "gpipe,nope"}, "--schedules 'nope' is unknown; choose some of naive,gpipe,1f1b"),
        ({"schedules": "auto"}, "--schedules 'auto' is unknown.*step6_schedules.table auto"),
        ({"schedules": ""}, "--schedules '' is unknown"),
        ({"schedules": "gpipe,gpipe"}, "--schedules names gpipe twice"),
        ({"num_ranks": 0}, "--num-ranks must be at least 1"),
        ({"num_ranks": 64, "num_microbatches": 1024}, "make 2097152 actions.*and 300000 is the most; take fewer"),
        ({"memory_cap": 0}, "--memory-cap must be a finite number above 0"),
        ({"png": "t.pdf"}, "--png 't.pdf' must end in .png or .svg"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(UsageError, match=message):
        CompareOptions(**given)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (16, 64)])
def test_the_figure_has_no_label_over_another(p, m):
    comparison, _ = numbers(num_ranks=p, num_microbatches=m)
    figure = comparison_figure(comparison)
    figure.draw_without_rendering()
    left, right = figure.axes
    assert len(left.lines) == len(comparison.curves) + 1
    labels = [Text.get_window_extent(text) for text in right.texts]  # without the line to its point
    assert sum(text.get_text().count(",") + 1 for text in right.texts) == len(comparison.found)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(labels, 2))
    assert all(box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height for box in labels)
    assert all(text.get_fontsize() >= 8 for text in right.texts)


def test_the_command_prints_and_writes(tmp_path):
    picture, file = tmp_path / "c.svg", tmp_path / "c.json"
    ran = python(
        "step6_schedules.compare", "--schedules", "gpipe,1f1b,naive", "--png", picture, "--json", file,
        environment={"DISPLAY": ""},
    )  # fmt: skip
    assert ran.status == 0, ran.text
    assert "1f1b      1       33        0.273   4\n" in ran.stdout
    assert "gpipe     1       33        0.273   8       1f1b\n" in ran.stdout
    found = json.loads(file.read_text())
    assert found == json.loads(as_json(compare(CompareOptions(schedules="gpipe,1f1b,naive"))))
    assert found["advice"] in ran.stdout
    assert picture.read_text().lstrip().startswith("<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "c.svg"]
