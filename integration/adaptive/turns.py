"""Several works in turns, so that a drift of the host is in all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def taking_turns(works: Mapping[Iterator[None], float]) -> None:
    """Exhaust iterators, each with about how many steps it has, at an even pace.

    The next step is of the one that is the least far on.
    """
    done = dict.fromkeys(works, 0)
    while done:
        work = min(done, key=lambda work: done[work] / works[work])
        try:
            next(work)
        except StopIteration:
            del done[work]
        else:
            done[work] += 1
