"""Which of several schedules to take, and why, in sentences made from their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LOW = 0.1  # a bubble below which few look further
EPSILON = 1e-9


@dataclass(frozen=True)
class Compared:
    """One schedule's numbers. makespan: in the unit of the costs. bubble: 0..1. memory: the most that a rank holds, in
    microbatches of all layers of a rank.
    """

    name: str
    chunks: int
    splits: bool
    makespan: float
    bubble: float
    memory: float


def beaten_by(one: Compared, found: Sequence[Compared]) -> Compared | None:
    """The schedule that has a smaller bubble with no more memory, or less memory with no larger bubble; of several the
    one with the smallest bubble, then the least memory. None when there is none.
    """
    better = [
        other
        for other in found
        if other.bubble <= one.bubble + EPSILON
        and other.memory <= one.memory + EPSILON
        and (other.bubble < one.bubble - EPSILON or other.memory < one.memory - EPSILON)
    ]
    return smallest_bubble(better)


def smallest_bubble(found: Sequence[Compared]) -> Compared | None:
    """The smallest bubble; of equal ones the least memory, then whole backwards, fewer chunks, and the first."""
    keys = [(round(e.bubble, 9), round(e.memory, 9), e.splits, e.chunks) for e in found]
    return found[keys.index(min(keys))] if found else None


def limit_of(found: Sequence[Compared], cap: float | None) -> tuple[float | None, str]:
    """How much may be held, and what says so: the cap, else what 1F1B holds, else nothing."""
    if cap is not None:
        return cap, "the cap"
    usual = next((each for each in found if each.name == "1f1b"), None)
    return (usual.memory, "as 1f1b does") if usual else (None, "")


def choice_of(found: Sequence[Compared], cap: float | None) -> Compared | None:
    """The smallest bubble within the limit; None when nothing keeps to it."""
    limit, _ = limit_of(found, cap)
    return smallest_bubble([each for each in found if limit is None or each.memory <= limit + EPSILON])


def advise(
    found: Sequence[Compared], cap: float | None = None, curves: Mapping[str, Sequence[tuple[int, float]]] | None = None
) -> str:
    """What to choose and why. curves: for each schedule (microbatches, bubble), ascending."""
    if not found:
        return "None of these schedules can have this size."
    chosen = choice_of(found, cap)
    if chosen is None:
        least = min(found, key=lambda each: each.memory)
        return f"None holds as little as {cap:g}: {least.name} needs the least, {least.memory:g}."
    limit, why = limit_of(found, cap)
    if chosen.name == "1f1b" and cap is None:
        why = "as it does itself"
    within = "" if limit is None else f" among those that hold at most {limit:g}, {why}"
    sentences = [f"Choose {chosen.name}: its bubble of {chosen.bubble:.3f} is the smallest{within}."]
    same = [e for e in found if e != chosen and abs(e.bubble - chosen.bubble) <= EPSILON
            and (limit is None or e.memory <= limit + EPSILON)]  # fmt: skip
    if same:
        sentences.append(f"{_joined([e.name for e in same])} {_has(same)} the same bubble{_price(chosen, same)}.")
    usual = next((each for each in found if each.name == "1f1b"), None)
    if usual not in (None, chosen, *same):
        sentences.append(_against(usual, chosen))
    best = smallest_bubble(found)
    if best.bubble < chosen.bubble - EPSILON:
        sentences.append(f"With room for {best.memory:g}, {best.name} brings it to {best.bubble:.3f}.")
    sentences += _costs(chosen)
    sentences += _microbatches(chosen, (curves or {}).get(chosen.name, []))
    return " ".join(sentences)


def _against(usual: Compared, chosen: Compared) -> str:
    if abs(usual.memory - chosen.memory) <= EPSILON:
        return f"1f1b, which holds as much, has {usual.bubble:.3f}."
    return f"1f1b has {usual.bubble:.3f} and holds {usual.memory:g}; {chosen.name} holds {chosen.memory:g}."


def _price(chosen: Compared, same: Sequence[Compared]) -> str:
    """What an equal bubble costs more with others."""
    more = [e for e in same if e.memory > chosen.memory + EPSILON]
    if len(more) == len(same):
        return f" and {'hold' if len(same) > 1 else 'holds'} more"
    return ""


def _costs(chosen: Compared) -> list[str]:
    found = []
    if chosen.splits:
        found.append("It splits the backward, so its stages must be able to, and there are three actions for two.")
    if chosen.chunks > 1:
        found.append(f"Its {chosen.chunks} chunks a rank mean about {chosen.chunks} times as many messages.")
    return found


def _microbatches(chosen: Compared, curve: Sequence[tuple[int, float]]) -> list[str]:
    """From how many microbatches on the bubble is low, of those that were tried."""
    low_from = None
    for count, bubble in reversed(curve):
        if bubble >= LOW - EPSILON:
            break
        low_from = count
    if low_from is None:
        return [f"Its bubble stays above {LOW:g} up to {curve[-1][0]} microbatches."] if curve else []
    if low_from == curve[0][0]:
        return []
    return [f"From {low_from} microbatches on its bubble is below {LOW:g}."]


def _has(found: Sequence[Compared]) -> str:
    return "have" if len(found) > 1 else "has"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
