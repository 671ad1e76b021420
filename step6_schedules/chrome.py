"""A trace as a file in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is described in Google's "Trace Event Format": `X` is a slice, `s` and `f` the two ends of an arrow, `C` a
counter, `M` a name. Times are in microseconds, from the first iteration shown.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from step0_monolith.files import write_whole
from step5_orchestrator.actions import Action, ends_flight
from step5_orchestrator.recording import Transfer
from step6_schedules.lanes import NAMES
from step6_schedules.trace import RankRecord, Trace, messages

COMPUTE = "compute"
THREADS = (COMPUTE, "send forward", "receive forward", "send backward", "receive backward")
# So that an arrow ends inside the slice it points to, whose end belongs to it no more.
WITHIN = 0.001


def write_trace(path: Path, trace: Trace) -> None:
    """Writes the file whole or not at all. Raises RunError when the disk refuses."""
    text = json.dumps(as_json(trace), separators=(",", ":"))
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="ascii"))


def as_json(trace: Trace) -> dict:
    """The file's content: events sorted by time, names first, and in `otherData` what the run was."""
    start = min(record.iterations[0].start for record in trace.ranks)
    events = [event for rank in range(len(trace.ranks)) for event in _of_rank(trace, rank, start)]
    events += _arrows(trace, start)
    names = [event for rank, record in enumerate(trace.ranks) for event in _names(rank, record, len(trace.ranks))]
    # Where two slices start together, the one around the other comes first.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    table = trace.table
    about = {
        "schedule": table.name,
        "num_ranks": table.num_ranks,
        "num_stages": table.num_stages,
        "num_microbatches": table.num_microbatches,
        "clocks": trace.clock_note,
        "clock_error_us": round(trace.clock_error * 1e6, 3),
    }
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": names + events}


def _micro(seconds: float, start: float) -> float:
    return round((seconds - start) * 1e6, 3)


def _slice(rank: int, thread: int, name: str, begin: float, end: float, **about) -> dict:
    return {
        "ph": "X", "pid": rank, "tid": thread, "name": name, "cat": THREADS[thread],
        "ts": begin, "dur": round(end - begin, 3), "args": about,
    }  # fmt: skip


def _names(rank: int, record: RankRecord, num_ranks: int) -> Iterator[dict]:
    name = f"rank {rank}"
    if num_ranks > len(record.peers):
        name += f" (replica {record.replica}, its rank {record.rank})"
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    used = {0} | {_thread(transfer) for iteration in record.iterations for transfer in iteration.transfers}
    for thread in sorted(used):
        about = {"ph": "M", "pid": rank, "tid": thread}
        yield {**about, "name": "thread_name", "args": {"name": THREADS[thread]}}
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _thread(transfer: Transfer) -> int:
    way = "forward" if transfer.value.kind == "activation" else "backward"
    return THREADS.index(f"{'send' if transfer.is_send else 'receive'} {way}")


def _of_rank(trace: Trace, rank: int, start: float) -> Iterator[dict]:
    record = trace.ranks[rank]
    count = held = 0
    for iteration in record.iterations:
        begin, end = _micro(iteration.start, start), _micro(iteration.end, start)
        yield _slice(rank, 0, f"iteration {iteration.number}", begin, end)
        for action, begins, ends in iteration.events:
            begin, end = _micro(begins, start), _micro(ends, start)
            yield _slice(rank, 0, str(action), begin, end, **_about(action))
            size = record.stage_bytes[action.stage][action.microbatch]
            change = (action.op == "F") - ends_flight(action)
            if change:
                count, held = count + change, held + change * size
                when = begin if action.op == "F" else end
                yield _counter(rank, "activations in flight", when, "activations", count)
                yield _counter(rank, "bytes of activations", when, "bytes", held)
        for transfer in iteration.transfers:
            begin, end = _micro(transfer.start, start), _micro(transfer.end, start)
            about = {"iteration": iteration.number, "bytes": record.message_bytes[transfer.value]}
            peer = record.peers[transfer.peer]
            about["to rank" if transfer.is_send else "from rank"] = peer
            yield _slice(rank, _thread(transfer), str(transfer.value), begin, end, **about)


def _about(action: Action) -> dict:
    return {"op": NAMES[action.op], "stage": action.stage, "microbatch": action.microbatch}


def _counter(rank: int, name: str, when: float, unit: str, value: int) -> dict:
    return {"ph": "C", "pid": rank, "tid": 0, "name": name, "ts": when, "args": {unit: value}}


def _arrows(trace: Trace, start: float) -> Iterator[dict]:
    for number, (source, destination, send, receive) in enumerate(messages(trace.ranks)):
        leaves, arrives = _micro(send.start, start), _micro(receive.end, start)
        about = {"name": "message", "cat": "message", "id": number}
        yield {"ph": "s", "pid": source, "tid": _thread(send), "ts": leaves, **about}
        inside = max(leaves, _micro(receive.start, start), round(arrives - WITHIN, 3))
        yield {"ph": "f", "bp": "e", "pid": destination, "tid": _thread(receive), "ts": inside, **about}
