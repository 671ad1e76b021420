"""Each rank can say what it waits for: a thread that answers when another rank raises the alarm."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

from step0_monolith.options import RunError
from step2_comms.notes import Note, explain

POLL_SECONDS = 0.2
ANSWER_SECONDS = 2.0


class Watch:
    """What this rank is doing, known to the others through the job's store.

    The main thread sets `doing`; a thread of its own answers an alarm, even while the main thread sleeps or waits
    inside a message, and ends the process when its launcher has died.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # (state, call, peer, since): one tuple, so that the thread never sees half of a change.
        self.doing: tuple[str, str, int | None, float] = ("busy", "", None, time.monotonic())
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=10))
        self._last_words: Note | None = None
        self._launcher = os.getppid()
        self._stopped = threading.Event()
        self._main = threading.main_thread().ident
        atexit.register(self._leave)
        self._thread = threading.Thread(target=self._answer, daemon=True, name="watch")
        self._thread.start()

    def busy(self, call: str) -> None:
        """This rank now computes `call`."""
        self.doing = ("busy", call, None, time.monotonic())

    @contextlib.contextmanager
    def waiting(self, call: str, peer: int | None = None):
        """This rank waits in `call` for `peer` (None: for all ranks); a failure inside becomes an explained RunError."""
        before = self.doing
        self.doing = ("waits", call, peer, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            raise self.explained(error) from error
        self.doing = before

    def explained(self, error: Exception) -> Exception:
        """The RunError that names the root of `error`, found by asking all ranks what they do; takes up to 2 s."""
        if isinstance(error, RunError):
            return error
        # torchrun ends all ranks as soon as one has died; the root must be named before this one goes.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        own = self._note()
        self._last_words = own
        try:
            notes = self._ask(own)
        except RuntimeError:
            return RunError(f"rank {self.rank}: {own.sentence()}, and the launcher's store is gone too ({error})")
        reason = "timed out" if "imed out" in str(error) or "imeout" in str(error) else "lost its peer"
        return RunError(f"rank {self.rank} {reason}: {explain(notes, self.rank, self.size)}")

    def failed(self, error: BaseException) -> None:
        """Leaves a note that this rank failed, for those who wait for it."""
        if self._last_words is None:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if isinstance(error, SystemExit | KeyboardInterrupt):
                self._last_words = Note(self.rank, "left", self.doing[1])
            else:
                self._last_words = Note(self.rank, "failed", error=text)
        self._write(self._last_words)

    def finish(self) -> None:
        """Leaves a note that this rank has finished, and stops the thread."""
        if self._last_words is None:
            self._last_words = Note(self.rank, "finished")
            self._write(self._last_words)
        self.stop()

    def stop(self) -> None:
        """Stops the thread; the last note stays."""
        atexit.unregister(self._leave)
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _ask(self, own: Note) -> dict[int, Note]:
        self._store.set(f"note/{self.rank}", own.to_json())
        self._store.set("alarm", "1")
        deadline = time.monotonic() + ANSWER_SECONDS
        notes: dict[int, Note] = {}
        while len(notes) < self.size and time.monotonic() < deadline:
            for rank in range(self.size):
                if rank not in notes and self._store.check([f"note/{rank}"]):
                    notes[rank] = Note.from_json(self._store.get(f"note/{rank}"))
            time.sleep(0.02)
        return notes

    def _note(self) -> Note:
        state, call, peer, since = self.doing
        return Note(self.rank, state, call, peer, self._where(), time.monotonic() - since)

    def _where(self) -> str:
        """File and line of the innermost frame of the main thread that is not the standard library's or torch's."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return ""
        frames = traceback.extract_stack(frame)
        ours = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(sys.base_prefix)]
        return f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno}" if ours else ""

    def _write(self, note: Note) -> None:
        with contextlib.suppress(RuntimeError):  # the store may have gone with its host; there is nobody left to tell
            self._store.set(f"note/{self.rank}", note.to_json())

    def _leave(self) -> None:
        self.failed(SystemExit())
        self.stop()

    def _answer(self) -> None:
        answered = False
        while not self._stopped.wait(POLL_SECONDS):
            if os.getppid() != self._launcher:
                print(f"rank {self.rank}: its launcher died; ending too", file=sys.stderr, flush=True)
                os._exit(1)
            if answered:
                continue
            try:
                if self._store.check(["alarm"]):
                    answered = True
                    if not self._store.check([f"note/{self.rank}"]):
                        self._store.set(f"note/{self.rank}", self._note().to_json())
            except RuntimeError:
                answered = True  # no store, nobody to answer; keep an eye on the launcher
