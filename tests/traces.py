"""What a file in Chrome's trace format must be, whoever wrote it."""

from collections import defaultdict

NAMES = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
         "thread_sort_index": "sort_index"}  # fmt: skip


def assert_valid(trace: dict) -> None:
    """The rules of the format that a viewer relies on: fields, order, nesting, arrows, counters."""
    assert {"displayTimeUnit", "otherData", "traceEvents"} == set(trace)
    events = trace["traceEvents"]
    names = [event for event in events if event["ph"] == "M"]
    rest = events[len(names) :]
    assert all(event["ph"] == "M" for event in events[: len(names)]), "names come first"
    for event in events:
        assert event["ph"] in "MXsfC"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
    for event in names:
        assert set(event["args"]) == {NAMES[event["name"]]}
    for event in rest:
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    times = [event["ts"] for event in rest]
    assert times == sorted(times), "sorted by time"
    named = {(event["pid"], event["tid"]) for event in names if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in rest} <= named
    for events_of_thread in slices(trace).values():
        assert_nested(events_of_thread)
    assert_arrows(trace)
    for counts in counters(trace).values():
        assert min(counts) >= 0
        assert counts[-1] == 0, "what a rank holds is given back in the end"


def slices(trace: dict) -> dict[tuple[int, int], list[dict]]:
    """The slices of each thread, in the file's order."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def end_of(event: dict) -> float:
    return round(event["ts"] + event["dur"], 3)


def assert_nested(events: list[dict]) -> None:
    """Slices of one thread lie in each other or apart."""
    opened: list[float] = []
    for event in events:
        while opened and opened[-1] <= event["ts"]:
            opened.pop()
        assert not opened or end_of(event) <= opened[-1], event
        opened.append(end_of(event))


def arrows(trace: dict) -> list[tuple[dict, dict]]:
    """Both ends of each arrow."""
    ends: dict[str, dict[int, dict]] = {"s": {}, "f": {}}
    for event in trace["traceEvents"]:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]], "an arrow has one start and one end"
            ends[event["ph"]][event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys()
    return [(ends["s"][number], ends["f"][number]) for number in ends["s"]]


def assert_arrows(trace: dict) -> None:
    """Each end lies in a slice of its thread, and no arrow points back in time."""
    of_thread = slices(trace)
    for start, end in arrows(trace):
        assert end["ts"] >= start["ts"]
        assert end["bp"] == "e"
        assert start["pid"] != end["pid"]
        for event in (start, end):
            around = of_thread[event["pid"], event["tid"]]
            assert any(each["ts"] <= event["ts"] <= end_of(each) for each in around), event


def counters(trace: dict) -> dict[tuple[int, str], list[int]]:
    """The values of each counter of each process, in time."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            (value,) = event["args"].values()
            found[event["pid"], event["name"]].append(value)
    return found
