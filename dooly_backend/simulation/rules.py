"""Where the schedulers of vLLM's versions differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """The rules of one version: those of 0.32.0, or those of 0.25.1 and before."""

    #: One request alone is never held to long_prefill_token_threshold.
    frees_lone_request: bool = True
    #: A preempted request that stands before the scanned one always moves the scan back by one.
    always_moves_back: bool = True
    #: Windows keep what steps under way still see.
    counts_in_flight: bool = True
    #: All full blocks of a window get a hash, not only those at the end of a prompt.
    hashes_all_of_windows: bool = False

    @classmethod
    def of(cls, version: str) -> Rules:
        """Those of a vLLM version; of a name that is none, the newest."""
        numbers = version.split(".")[:2]
        whole = len(numbers) == 2 and all(number.isdigit() for number in numbers)
        if whole and tuple(map(int, numbers)) < (0, 32):
            return _OLD
        return cls()


_OLD = Rules(False, False, False, True)
