"""The cells of a CSV file as text, however a spreadsheet program wrote it."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from step0_monolith.options import UsageError

MAX_BYTES = 32 * 2**20
# Stands for the semicolon inside parentheses, which separates no cells.
INNER = "\x1f"

_WORKBOOKS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")


def records(path: Path) -> Iterator[list[str]]:
    """The file's lines, each a list of cells; a semicolon inside parentheses comes as INNER.

    Takes UTF-8 and UTF-16, a byte-order mark, any line ends, and cells that are quoted or not and separated by commas,
    semicolons or tabs, whichever occurs most. Raises UsageError for a file that is not there, is no text, or is too
    large.
    """
    text = _decoded(path, _content(path))
    text = re.sub(r"\([^()\r\n]*\)", lambda match: match[0].replace(";", INNER), text)
    separator = max(",;\t", key=text.count)
    # newline=None: LF, CRLF and CR all end a line.
    reader = csv.reader(io.StringIO(text, newline=None), delimiter=separator, skipinitialspace=True)
    row = 0
    try:
        for cells in reader:
            row += 1
            yield cells
    except csv.Error:
        raise UsageError(
            f"{str(path)!r}: row {row + 1} has a cell that is longer than any action; look for a quote without an end"
        ) from None


def _content(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise UsageError(f"{str(path)!r} is a directory; name a CSV file in it")
        if path.exists() and not path.is_file():
            raise UsageError(f"{str(path)!r} is not an ordinary file; name a CSV file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read ({error.strerror}); name a CSV file that is there") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{str(path)!r} is larger than {MAX_BYTES // 2**20} MiB; name a CSV file that holds one table")
    return data


def _decoded(path: Path, data: bytes) -> str:
    if data.startswith(_WORKBOOKS):
        raise UsageError(f"{str(path)!r} is a workbook, not CSV; save the sheet as CSV in the spreadsheet program")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif b"\0" in data[:2]:  # UTF-16 without a mark: the first character of a table is ASCII
        encoding = "utf-16-be" if data[:1] == b"\0" else "utf-16-le"
    else:
        encoding = "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{str(path)!r} is no text in UTF-8 or UTF-16; save the table as CSV")
    return text
