"""Command lines made from dataclasses: each option is declared, explained and checked in one place."""

import argparse
import dataclasses
import errno
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# What a place that students have still to write says when it is called.
NOT_WRITTEN = "is not written yet"


class UsageError(ValueError):
    """A mistake of the person who gave the command; the message is one line that says what to do."""


class RunError(RuntimeError):
    """A failure while running that is not a bug of ours: a lost peer, a timeout, a damaged file."""


def option(default: Any, convert: Callable[[str, Any], Any], help: str, *, argument: str = "") -> Any:
    """A dataclass field that is also a command-line flag; `convert(flag, value)` returns the value or raises.

    argument: the name of a positional argument, for a field that is one instead of a flag.
    """
    return dataclasses.field(default=default, metadata={"convert": convert, "help": help, "argument": argument})


def flag_of(name: str) -> str:
    """The flag of a field: num_layers becomes --num-layers."""
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of all option classes: every field is converted and checked when the object is made.

    Raises UsageError that names the flag, the value and what is allowed.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = field.metadata["argument"] or flag_of(field.name)
            value = field.metadata["convert"](name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        self.check_together()

    def check_together(self) -> None:
        """Checks that involve more than one field."""


def whole(minimum: int, maximum: int | None = None) -> Callable[[str, Any], int]:
    """A whole number from `minimum` to `maximum`."""

    def convert(flag: str, value: Any) -> int:
        number = value
        if isinstance(value, str):
            # int() alone would also take "1_0", " 3 " and digits of other scripts.
            number = int(value) if re.fullmatch(r"[+-]?[0-9]{1,40}", value) else None
        if isinstance(number, bool) or not isinstance(number, int):
            raise UsageError(f"{flag} must be a whole number, not {value!r}")
        if number < minimum:
            raise UsageError(f"{flag} must be at least {minimum}, not {number}")
        if maximum is not None and number > maximum:
            raise UsageError(f"{flag} must be at most {maximum}, not {number}")
        return number

    return convert


def number(above: float = -math.inf, at_most: float = math.inf, or_equal: bool = False) -> Callable[[str, Any], float]:
    """A finite number greater than `above` (with `or_equal` also equal to it), and not greater than `at_most`."""

    def convert(flag: str, value: Any) -> float:
        try:
            # float() alone would also take "1_0" and digits of other scripts.
            result = float("x" if isinstance(value, str) and ("_" in value or not value.isascii()) else value)
        except (TypeError, ValueError):
            raise UsageError(f"{flag} must be a number, not {value!r}") from None
        if not math.isfinite(result) or result < above or (result == above and not or_equal):
            words = "not below" if or_equal else "above"
            raise UsageError(f"{flag} must be a finite number {words} {above:g}, not {value}")
        if result > at_most:
            raise UsageError(f"{flag} must be at most {at_most:g}, not {value}")
        return result

    return convert


def one_of(*names: str) -> Callable[[str, Any], str]:
    """One of the given names."""

    def convert(flag: str, value: Any) -> str:
        if value not in names:
            raise UsageError(f"{flag} {value!r} is unknown; choose one of: {', '.join(names)}")
        return value

    convert.names = names
    return convert


def optional(inner: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """The value may also be absent (None)."""
    return lambda flag, value: None if value is None else inner(flag, value)


def switch(flag: str, value: Any) -> bool:
    """A flag that takes no value: it is there or not."""
    if not isinstance(value, bool):
        raise UsageError(f"{flag} must be True or False, not {value!r}")
    return value


def folder(flag: str, value: Any) -> Path:
    """A path of a directory, which need not be there yet."""
    if str(value).strip() == "":
        raise UsageError(f"{flag} {str(value)!r} is no name of a directory")
    return Path(value)


def output_file(*suffixes: str) -> Callable[[str, Any], Path]:
    """A path that ends in one of the suffixes; whether it can be written is checked by `files.check_writable`."""

    def convert(flag: str, value: Any) -> Path:
        path = Path(value)
        if str(value) == "":
            raise UsageError(f"{flag} '' is no file name; it must end in {' or '.join(suffixes)}")
        if path.suffix not in suffixes:
            raise UsageError(f"{flag} {str(path)!r} must end in {' or '.join(suffixes)}")
        return path

    return convert


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        message = " ".join(message.split())  # one line, whatever was typed
        raise UsageError(f"{message}; see {self.prog} --help")


def parse(prog: str, description: str, takes: dict[type[Options], Iterable[str] | None], argv=None) -> list[Options]:
    """Reads the command line of `prog` and returns one object for each class in `takes`.

    `takes` maps an option class to the names of its fields that this program uses (None: all), so that a flag
    exists only where it works. Raises UsageError; `--help` prints and exits with status 0.
    """
    parser = _Parser(
        prog=prog, description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    wanted = {}
    for cls, names in takes.items():
        known = {field.name: field for field in dataclasses.fields(cls)}
        wanted[cls] = [known[name] for name in (known if names is None else names)]
        for field in wanted[cls]:
            choices = getattr(field.metadata["convert"], "names", None)
            if field.metadata["argument"]:
                parser.add_argument(field.name, metavar=field.metadata["argument"], help=field.metadata["help"])
                continue
            if field.metadata["convert"] is switch:
                parser.add_argument(flag_of(field.name), action="store_true", help=field.metadata["help"])
                continue
            text = field.metadata["help"] + ("" if field.default is None else f" (default: {field.default})")
            parser.add_argument(
                flag_of(field.name),
                default=field.default,
                metavar="{" + ",".join(choices) + "}" if choices else "VALUE",
                help=text.replace("%", "%%"),
            )
    given = vars(parser.parse_args(argv))
    return [cls(**{field.name: given[field.name] for field in chosen}) for cls, chosen in wanted.items()]


def run_program(main: Callable[[], None]) -> None:
    """Runs a program's `main` and turns the two kinds of expected error into one line and an exit status.

    UsageError ends with status 2, RunError with 1, an interrupt with 130, and so does, with 1, a place that is still to
    be written; anything else is a bug and keeps its traceback.
    """
    if sys.stdout is not None:  # None where it was closed
        # A name that the terminal's encoding lacks is shown with escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except UsageError as error:
        _say(error)
        sys.exit(2)
    except RunError as error:
        _say(error)
        sys.exit(1)
    except NotImplementedError as error:
        if NOT_WRITTEN not in str(error):
            raise
        _say(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Whoever read our output has gone (`| head`), or its disk is full. Python would complain again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.ENOSPC:
            _say(RunError(f"the output could not be written: {error.strerror}"))
        sys.exit(1)


def _say(error: Exception) -> None:
    # In one write, so that the lines of several ranks do not run into each other.
    if sys.stderr is not None:  # None where it was closed
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
