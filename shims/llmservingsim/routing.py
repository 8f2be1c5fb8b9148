"""How the simulator's default router spreads tokens over experts, restated.

``BALANCED`` at expert parallelism d: every rank owns E/d of the E experts, and
of T tokens with k experts each it computes T * (1 - (1 - 1/d)^k), with as many
of its experts active as there are pairs to go around.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """Of a model with `experts` experts, `each` for a token, at expert parallelism `degree`."""

    experts: int
    each: int
    degree: int

    @property
    def owned(self) -> int:
        """Experts of one rank."""
        return max(1, self.experts // self.degree)

    @property
    def share(self) -> float:
        """Of all tokens, those that a rank computes."""
        return 1.0 - (1.0 - 1.0 / self.degree) ** self.each

    def tokens(self, tokens: int) -> int:
        """Tokens of one rank in a step of `tokens`."""
        return round(tokens * self.share)

    def active(self, tokens: int) -> int:
        """Experts of one rank that such a step activates."""
        return max(1, min(round(tokens * self.each / self.degree), self.owned))

    def step_tokens(self, tokens: int) -> int:
        """About how many tokens the step has of which a rank computes `tokens`."""
        return max(1, round(tokens / self.share))


def expert_parallelism(experts: int, degree: int) -> int:
    """What the simulator takes at tensor parallelism `degree`: the same, where it divides."""
    return degree if experts % degree == 0 else 1
