"""Files appear whole or not at all, and a path that cannot be written is found out before the work, not after."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from step0_monolith.options import RunError, UsageError


def check_writable(flag: str, path: Path | None) -> None:
    """Raises UsageError unless a file can be written at `path` (None: nothing to check); leaves nothing behind."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{flag} {str(path)!r} is a directory; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UsageError(f"{flag} {str(path)!r} cannot be written ({error.strerror}); choose another place") from None


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a temporary path beside `path`, then renames it into place.

    Raises RunError when the disk refuses; the older file, if any, is then untouched.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    try:
        write(Path(name))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes private files; the result is an ordinary one
        os.replace(name, path)
    except OSError as error:
        raise RunError(f"{str(path)!r} could not be written: {error.strerror}") from error
    finally:
        Path(name).unlink(missing_ok=True)
