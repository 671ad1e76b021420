"""Each rank can say what it waits for: a thread that answers when another rank raises the alarm."""

import atexit
import contextlib
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from step0_monolith.options import RunError
from step2_comms.notes import Note, chain, explain
from step2_comms.symptoms import TIMED_OUT, reason, where
from step2_comms.termination import Termination

POLL_SECONDS = 0.2
ANSWER_SECONDS = 2.0

Doing = tuple[str, str, int | None, float]


class Waiting:
    """What `Watch.waiting` returns. A class, since each message passes here: a generator takes three times as long."""

    __slots__ = ("_before", "_call", "_peer", "_watch")

    def __init__(self, watch: "Watch", call: str, peer: int | None) -> None:
        self._watch, self._call, self._peer = watch, call, peer

    def __enter__(self) -> None:
        self._before = self._watch.waits(self._call, self._peer)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._watch.goes_on(self._before)
        elif isinstance(error, RuntimeError) and not isinstance(error, RunError):
            raise self._watch.explained(error) from error


class Watch:
    """What this rank is doing, known to the others through the job's store.

    The main thread sets `doing`; a thread of its own answers an alarm, even while the main thread sleeps or waits
    inside a message, and ends the process when its launcher has died.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, launcher: int | None = None) -> None:
        """launcher: process id of the launcher; None: this process's parent."""
        self.rank, self.size = rank, size
        # (state, call, peer, since): one tuple, so that the thread never sees half of a change.
        self.doing: Doing = ("busy", "", None, time.monotonic())
        # A connection of its own: the main thread may be waiting for an answer on the first one.
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=10))
        # The lock keeps the thread from replacing this rank's last words by an answer that was true a moment before.
        self._lock = threading.Lock()
        self._told: Note | None = None
        self._last_words: Note | None = None
        self._verdict: str | None = None
        self._termination = Termination()
        self._launcher = os.getppid() if launcher is None else launcher
        self._stopped = threading.Event()
        self._main = threading.main_thread().ident
        atexit.register(self._leave)
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()

    def busy(self, call: str) -> None:
        """This rank now computes `call`."""
        self.doing = ("busy", call, None, time.monotonic())

    def waits(self, call: str, peer: int | None) -> Doing:
        """This rank now waits in `call` for `peer`. Returns what it did before, for `goes_on`."""
        before = self.doing
        self.doing = ("waits", call, peer, time.monotonic())
        return before

    def goes_on(self, before: Doing) -> None:
        """This rank now does again what it did before it waited."""
        state, call, peer, _ = before
        self.doing = (state, call, peer, time.monotonic())

    def waiting(self, call: str, peer: int | None = None) -> "Waiting":
        """For `with`: this rank waits in `call` for `peer` (None: for all ranks); a failure inside is explained."""
        return Waiting(self, call, peer)

    @property
    def is_over(self) -> bool:
        """Whether this rank has failed: nothing more can be waited for."""
        return self._last_words is not None

    def has_ended(self, rank: int) -> bool:
        """Whether `rank` has left a note that it sends nothing more; one that was killed leaves none."""
        return self._store.check([_key(rank)]) and Note.from_json(self._store.get(_key(rank))).is_last

    def explained(self, error: Exception) -> RunError:
        """The RunError that names the root of `error`, found by asking all ranks what they do; takes up to 2 s.

        From here on this rank is over, and has some seconds to say so even after SIGTERM: torchrun sends that to all
        ranks as soon as one has died, and the root must be named first.
        """
        if isinstance(error, RunError):
            return error
        if self._verdict is None:
            self._termination.explain()
            self._verdict = f"rank {self.rank} {self._find_root(error)}"
        return RunError(self._verdict)

    def failed(self, error: BaseException) -> None:
        """Leaves a note that this rank failed, for those who wait for it; called before its connections close."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        left = isinstance(error, SystemExit | KeyboardInterrupt)
        note = Note(self.rank, "left", self.doing[1]) if left else Note(self.rank, "failed", error=text)
        with self._lock:
            self._last_words = self._last_words or note
        self._write(self._last_words)

    def finish(self) -> None:
        """Leaves a note that this rank has finished, and stops the thread."""
        with self._lock:
            self._last_words = self._last_words or Note(self.rank, "finished")
        self._write(self._last_words)
        self.stop()

    def stop(self) -> None:
        """Stops the thread and gives SIGTERM its meaning back; the last note stays."""
        atexit.unregister(self._leave)
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._termination.wake()
        self._thread.join(timeout=5)
        self._termination.restore()

    def _find_root(self, error: Exception) -> str:
        what = reason(error)
        if self.is_over:
            return f"cannot go on: {self._last_words.sentence()}"
        if what is None:
            self.failed(error)
            return f"failed in {self.doing[1]}: {self._last_words.error}"
        with self._lock:
            own = self._last_words = replace(self._note(), gave_up=True)
        try:
            notes = self._ask(own)
        except RuntimeError:
            return f"{what}: {own.sentence()}, and the launcher's store is gone too"
        path = chain(notes, self.rank, self.size)
        told = self._told
        if told and told.state == "busy" and len(path) > 1 and path[-1] == self.rank and what != TIMED_OUT:
            # The circle is none: the rank before this one in it had given up while this one was busy.
            self._last_words = replace(told, gave_up=True)
            return f"came too late, it was {told.activity()}; {notes[path[-2]].sentence()}"
        self._write(own)
        return f"{what}: {explain(notes, self.rank, self.size)}"

    def _ask(self, own: Note) -> dict[int, Note]:
        """Raises the alarm and collects notes until they lead to the root, or to a rank silent for 2 s."""
        if self._told is None:
            self._store.set(_key(self.rank), own.to_json())
        self._store.set("alarm", "1")
        deadline = time.monotonic() + ANSWER_SECONDS
        notes = {self.rank: own}
        while True:
            for rank in range(self.size):
                if rank not in notes and self._store.check([_key(rank)]):
                    notes[rank] = Note.from_json(self._store.get(_key(rank)))
            end = chain(notes, self.rank, self.size)[-1]
            if end in notes:
                return notes
            if time.monotonic() > deadline:
                # So that those who ask next need not wait for it again; an answer that comes now wins.
                self._store.compare_set(_key(end), "", Note(end, "silent").to_json())
                return notes
            time.sleep(0.02)

    def _note(self) -> Note:
        state, call, peer, since = self.doing
        place = where(self._main) if state == "busy" else ""
        return Note(self.rank, state, call, peer, place, time.monotonic() - since)

    def _write(self, note: Note) -> None:
        with contextlib.suppress(RuntimeError):  # the store may have gone with its host; there is nobody left to tell
            self._store.set(_key(note.rank), note.to_json())
            self._store.check([_key(note.rank)])  # `set` alone returns before the store has the note

    def _leave(self) -> None:
        self.failed(SystemExit())
        self.stop()

    def _run(self) -> None:
        done = False
        while not self._stopped.is_set():
            self._termination.wait(POLL_SECONDS)
            if os.getppid() != self._launcher:
                with contextlib.suppress(OSError):  # the terminal may have gone with the launcher
                    os.write(2, f"rank {self.rank}: its launcher died; ending too\n".encode())
                os._exit(1)
            if not done:
                try:
                    done = self._answer()
                except RuntimeError:
                    done = True  # no store, nobody to answer; keep an eye on the launcher

    def _answer(self) -> bool:
        """Answers once when there is an alarm; returns whether there was one."""
        if not self._store.check(["alarm"]):
            return False
        with self._lock:
            if self._last_words is None:
                self._told = self._note()
                self._store.set(_key(self.rank), self._told.to_json())
        return True


def _key(rank: int) -> str:
    return f"note/{rank}"
