"""Files appear whole or not at all, and a path that cannot be written is found out before the work, not after."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from step0_monolith.options import RunError, UsageError


def check_writable(flag: str, path: Path | None) -> None:
    """Raises UsageError unless a file can be written at `path` (None: nothing to check); leaves nothing behind."""
    if path is None:
        return
    given, path = str(path), Path(os.path.realpath(path))
    try:
        if path.is_dir():
            raise UsageError(f"{flag} {given!r} is a directory; name a file in it")
        if path.exists() and not path.is_file():
            raise UsageError(f"{flag} {given!r} is not an ordinary file; choose another name")
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)  # says so when the name is too long
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UsageError(f"{flag} {given!r} cannot be written ({error.strerror}); choose another place") from None


def sync(path: Path) -> None:
    """Has the system put a file, or the list of files of a directory, on its disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_ordinary(path: Path) -> None:
    """Gives a file that was made as a private one (as temporary files are) the permissions that new files have."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a temporary path beside `path`, then renames it into place.

    Raises RunError when the disk refuses; the older file, if any, is then untouched.
    """
    given, path, name = str(path), Path(os.path.realpath(path)), None
    try:
        # A short name, since the file's own may be as long as names can be.
        handle, name = tempfile.mkstemp(prefix=".part-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        write(Path(name))
        make_ordinary(Path(name))
        sync(Path(name))
        os.replace(name, path)
    except OSError as error:
        raise RunError(f"{given!r} could not be written: {error.strerror}") from error
    finally:
        if name is not None:
            Path(name).unlink(missing_ok=True)
