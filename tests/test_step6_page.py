"""Step 6: the timeline as a page: what it holds, and what a reader in a real browser sees."""

import dataclasses
import json
import re

import pytest

from step0_monolith.options import UsageError
from step5_orchestrator.actions import is_given, needs
from step5_orchestrator.costs import UNIT_COST, costs
from step5_orchestrator.table import make_table
from step6_schedules.page import KINDS, other_timelines, page_of, write_page
from step6_schedules.schedules import SCHEDULES
from step6_schedules.table import check_picture
from step6_schedules.timed import measured, predicted
from tests.browser import Page, browser
from tests.ranks import python
from tests.test_step6_timeline import events_of

COST = costs(5.0, 10.0)


def run_of(schedule: str, p: int, m: int):
    """A prediction, and a run that went a tenth slower."""
    table = SCHEDULES[schedule](p, m)
    return predicted(table, COST, "ms", [9] * p), measured(table, events_of(table, COST, 1.1), "here", [9] * p)


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


@pytest.mark.parametrize(("schedule", "p", "m"), [("1f1b", 4, 8), ("zb-v", 3, 4), ("naive", 1, 1)])
def test_the_page_holds_the_times_and_what_each_action_needs(schedule, p, m):
    timeds = run_of(schedule, p, m)
    data = data_of(page_of(timeds))
    for timed, found in zip(timeds, data["timelines"], strict=True):
        names = [f"{s}{o}{b}" for s, o, b in zip(found["stage"], found["op"], found["microbatch"], strict=True)]
        order = [action for row in timed.table.rows for action in row]
        assert names == list(map(str, order))
        assert found["start"] == pytest.approx([timed.times[action][0] for action in order], abs=1e-5)
        assert found["end"] == pytest.approx([timed.times[action][1] for action in order], abs=1e-5)
        assert [names[i] for i in found["path"]] == list(map(str, timed.critical_path))
        assert found["peaks"] == timed.peak_in_flight
        for action, pairs in zip(order, found["needs"], strict=True):
            assert [names[j] for j, _ in pairs if j >= 0] == list(map(str, timed.sources(action)))
            assert [list(KINDS)[kind] for _, kind in pairs] == [value.kind for value in needs(action)]
            assert [j < 0 for j, _ in pairs] == [is_given(value, timed.table.num_stages) for value in needs(action)]
        for rank, row in enumerate(found["rows"]):
            assert [found["before"][i] for i in row] == [-1, *row[:-1]]
            assert {found["rank"][i] for i in row} == {rank}


def test_the_page_needs_nothing_from_outside():
    page = page_of(run_of("1f1b", 4, 8))
    assert not re.findall(r"https?:|//[a-z]|<link|src=|@import|url\(|fetch\(|XMLHttpRequest", page)


def test_a_name_cannot_end_the_script():
    table = make_table("</script><b>&'\"$ %DATA%", SCHEDULES["gpipe"](2, 2).rows)
    page = page_of([predicted(table, UNIT_COST)])
    assert page.count("</script>") == 2
    assert "<b>" not in page
    assert data_of(page)["timelines"][0]["name"] == table.name


def test_others_have_the_same_work_and_the_page_stays_small():
    planned = predicted(SCHEDULES["interleaved"](4, 8), costs(1.0, 2.0), "ms")
    others = {timed.table.name: timed for timed in other_timelines(planned)}
    assert set(others) == set(SCHEDULES) - {"interleaved"}
    for timed in [planned, *others.values()]:  # 8 microbatches through a rank's layers, F=2 and B=4 for all of them
        for row in timed.rows:
            assert sum(end - start for _, start, end in row) == pytest.approx(8 * 6)
    assert others["1f1b"].makespan == pytest.approx((8 + 3) * 6)
    large = predicted(SCHEDULES["interleaved"](16, 64), COST, "ms")
    assert len(page_of([large, *other_timelines(large)]).encode()) < 2.5e6
    assert other_timelines(predicted(SCHEDULES["interleaved"](16, 256), COST, "ms")) == []


def test_a_table_too_large_for_a_page_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--html .* has room for 10 actions, not 64"):
        check_picture(SCHEDULES["1f1b"](4, 8), "--html", tmp_path / "t.html", 10)


@pytest.mark.slow
def test_the_table_command_writes_a_page(tmp_path):
    ran = python("step6_schedules.table", "zb-h1", "--html", tmp_path / "t.html")
    assert ran.status == 0, ran.text
    names = [timeline["name"] for timeline in data_of((tmp_path / "t.html").read_text())["timelines"]]
    assert names[0] == "zb-h1"
    assert set(names) == set(SCHEDULES)


@pytest.mark.browser
@pytest.mark.timeout(90)
def test_a_reader_in_a_browser(tmp_path):
    planned, ran = run_of("1f1b", 4, 8)
    others = other_timelines(planned)
    slots = dataclasses.replace(predicted(planned.table, UNIT_COST), note="in slots")
    file = tmp_path / "page.html"
    write_page(file, [planned, ran, *others, slots])
    with browser() as driver:
        page = Page(driver, file)
        points_and_reads(page, planned, ran)
        zooms_and_moves(page, planned, ran)
        steps_through_time(page, planned)
        switches_and_compares(page, others)
        assert page.ask("performance.getEntriesByType('resource').length") == 0
        assert driver.get_log("browser") == []


def points_and_reads(page, planned, ran) -> None:
    assert page.ask("document.title") == "1f1b: who does what when"
    for index, timed in enumerate((planned, ran)):
        for action in timed.critical_path[3:6] + [timed.table.rows[1][0], timed.table.rows[3][-1]]:
            page.point_at(index, str(action))
            said = page.said()
            assert said[0].startswith(f"{action}: "), said
            assert f"stage {action.stage}, rank {timed.table.rank_of_stage[action.stage]}" in said[0]
            assert ("measured" if timed.is_measured else "predicted") in said[0]
            marks = [line for line in said if "Waiting for what" in line or "Nobody waits" in line]
            split = said.index(marks[0])
            needed = [re.search(r"(\d+[FBIW]\d+) \(", line) for line in said[3:split]]
            assert [match[1] for match in needed if match] == list(map(str, timed.sources(action)))
            waiting = [re.match(r"(\d+[FBIW]\d+) ", line)[1] for line in said[split + 1 :]]
            assert sorted(waiting) == sorted(map(str, timed.waiters(action)))
    page.point_at(0, "0F0")
    assert "the batch, which is given" in page.said()
    page.point_at(0, "3B0")
    assert "the gradient of the loss, which is given" in page.said()


def zooms_and_moves(page, planned, ran) -> None:
    whole = page.ask("[state.view.start, state.view.end]")
    assert whole == [0, pytest.approx(ran.makespan)]
    page.press("++")
    start, end = page.ask("[state.view.start, state.view.end]")
    assert end - start == pytest.approx(ran.makespan / 1.4**2)
    from selenium.webdriver.common.keys import Keys

    page.press(Keys.ARROW_RIGHT)
    assert page.ask("state.view.start") > start
    page.press("0")
    assert page.ask("[state.view.start, state.view.end]") == whole
    # A wheel zooms around the pointer: what lies under it stays there.
    x, y = page.ask("locate(0, '1B3')")
    page.ask(
        "canvas.dispatchEvent(new WheelEvent('wheel', {deltaY: -1, cancelable: true, clientX: arguments[0], "
        "clientY: arguments[1]}))", x, y,
    )  # fmt: skip
    assert page.ask("locate(0, '1B3')") == [pytest.approx(x, abs=1), pytest.approx(y, abs=1)]
    assert page.ask("state.view.end - state.view.start") < ran.makespan
    page.driver.find_element("id", "fit").click()
    assert page.ask("[state.view.start, state.view.end]") == whole


def steps_through_time(page, planned) -> None:
    from selenium.webdriver.common.keys import Keys

    page.press(Keys.ESCAPE)
    order = sorted(planned.times, key=lambda a: (planned.times[a][0], planned.table.rank_of_stage[a.stage]))
    for action in order[:5]:
        page.press("n")
        assert page.said()[0].startswith(f"{action}: ")
    page.press("p")
    assert page.said()[0].startswith(f"{order[3]}: ")
    # A moment: the slider's, with what each rank does then.
    page.press(Keys.ESCAPE)
    page.ask("(byId('time').value = 500, byId('time').dispatchEvent(new Event('input')))")
    moment = page.ask("state.cursor")
    said = page.said()
    for rank, row in enumerate(planned.rows):
        now = next((str(a) for a, start, end in row if start <= moment < end), "idle")
        held = [round(count) for at, count in planned.held[rank] if at <= moment][-1:] or [0]
        assert f"rank {rank}: {now}, holds {held[0]} activation{'' if held[0] == 1 else 's'}" in said
    page.ask("document.activeElement.blur()")  # a button that has the focus keeps the space bar for itself
    page.press(" ")
    assert page.ask("timer !== null")
    page.press(" ")
    assert page.ask("timer === null")
    page.press(Keys.ESCAPE)


def switches_and_compares(page, others) -> None:
    assert page.ask("[state.main, state.other]") == [0, 1]
    page.press("m")
    assert page.ask("[state.main, state.other]") == [1, 0]
    page.press("m")
    page.press("c")
    assert page.ask("[state.main, state.other]") == [0, 2]
    page.choose("other", "zb-h1, predicted")
    assert [page.ask(f"shown()[{n}].name") for n in (0, 1)] == ["1f1b", "zb-h1"]
    texts = page.driver.find_element("id", "legend").text
    assert "backward for the weights" in texts
    assert page.ask("shown().length") == 2
    one_axis = page.ask("[locate(0, '0F0')[0], locate(data.timelines.indexOf(shown()[1]), '0F0')[0]]")
    assert one_axis[0] == pytest.approx(one_axis[1], abs=0.5)
    # What counts in slots has no place on an axis in milliseconds.
    offered = page.ask("[...byId('other').options].map((option) => option.textContent)")
    assert offered == ["nothing", "1f1b, measured", *(f"{timed.table.name}, predicted" for timed in others)]
    page.ask("document.activeElement.blur()")
    page.press("k")
    assert page.ask("state.showPath")
    page.press("?")
    assert page.driver.find_element("id", "help").is_displayed()
