"""Turns of the sources of groups, by which updates keep the mixture of sources. Pure code: no tasks, no clock.

The source of a group is its teacher, and with `schedule.mixture` also its value in a data column. Each submitted group
appends one turn for its source. Each turn goes to the first ready group of its source. So slow groups do not change the
shares of sources. No update waits for a group that another group of the same source can replace.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence


def give_up_turn(turns: list[str], source: str) -> None:
    """Remove the last turn of a source whose group is dropped, so that earlier turns do not shift."""
    del turns[len(turns) - 1 - turns[::-1].index(source)]


def chosen_by_turn(
    turns: Sequence[str], candidates: Iterable[int], sources: Mapping[int, str], learning: Sequence[int], size: int
) -> list[int]:
    """Return the first candidates that match the sources of an update's turns.

    An update has `size` turns, of which the groups in `learning` have used some.
    """
    missing, chosen = size - len(learning), list[int]()
    wanted = Counter(turns[:size])
    wanted.subtract(sources[number] for number in learning)
    for number in candidates:
        if len(chosen) == missing:
            break
        if wanted[sources[number]]:
            wanted[sources[number]] -= 1
            chosen.append(number)
    return chosen


def all_in_time(turns: Sequence[str], oldest_first: Iterable[tuple[str, int]], first: int, size: int) -> bool:
    """Return whether each group gets a turn in time, if the groups of a source get its turns oldest first.

    Groups are pairs of their source and the last version at which they may be learned from. At every version `size`
    turns are used, and the turns begin with those of version `first`.
    """
    limits = defaultdict[str, deque[int]](deque)
    for source, limit in oldest_first:
        limits[source].append(limit)
    return all(first + place // size <= limits[source].popleft() for place, source in enumerate(turns))
