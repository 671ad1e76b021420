"""Numbers with their nouns, for reports and messages."""

from collections.abc import Sequence


def counted(number: int | str, noun: str) -> str:
    """Such as `1 rank`, `4 ranks`, `8 microbatches`; a word in place of the number counts as several."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def printable(text: str) -> str:
    """The text on one line, with escapes in place of what a terminal would act on."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def named(noun: str, numbers: Sequence[int]) -> str:
    """Such as `stage 2`, `stages 0, 1`."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
