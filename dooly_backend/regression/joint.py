"""Prefills and decodes in one batch: what they take together.

A batch with both takes the longer part and a share of the shorter one. Where no such
batch was measured, both, with what the cheapest measured batch takes (a launch) counted
once. It takes no less than the longest decode needs where its keys are not split: many
kernels split a decode's keys among the device's cores only where all requests decode
(FlashAttention 3 by the longest query; `use_3d` of vLLM's Triton kernel), so that beside
a prefill four decodes of 2,048 tokens took an H200 six times as long as alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.models import Parameters, Training
from dooly_backend.regression.scalar import Code, literal

_FEWEST = 3  # measured batches with both phases
_SHARES = np.linspace(0.0, 1.0, 21)
_LAUNCHES = np.linspace(0.0, 1.0, 5)  # of the cheapest batch
_MOST_CHAINS = 30  # that are tried
_GAIN = 0.8  # of the error without a chain; a chain is worth its parameter below that

#: The feature that the chain grows with.
LONGEST = "decode_longest"


@dataclass(frozen=True)
class Joint:
    """The longer phase, and a share of the shorter beyond a launch.

    `chain` is microseconds for each key of the longest decode; 0: it bounds nothing.
    """

    launch: float
    share: float
    chain: float = 0.0

    def many(self, one: Floats, other: Floats, longest: Floats) -> Floats:
        """Where either phase is 0, the other alone. `longest` are keys."""
        both = (one > 0) & (other > 0)
        longer, shorter = np.maximum(one, other), np.minimum(one, other)
        together = longer + self.share * np.maximum(shorter - self.launch, 0.0)
        return np.where(both, np.maximum(together, self.chain * longest), longer)

    def write(self, code: Code, one: str, other: str, longest: str) -> str:
        """The same for one batch, as lines; arguments are names, as is the result."""
        us, beyond = code.name(), code.name()
        launch = literal(self.launch)
        with code.block(f"if {one} > {other}"):
            code.line(f"{us} = {one}; {beyond} = {other} - {launch}")
        with code.block("else"):
            code.line(f"{us} = {other}; {beyond} = {one} - {launch}")
        with code.block(f"if {beyond} > 0.0"):
            code.line(f"{us} += {literal(self.share)} * {beyond}")
        if self.chain:
            bound = code.let(f"{literal(self.chain)} * {longest}")
            with code.block(f"if {bound} > {us} and {one} > 0.0 and {other} > 0.0"):
                code.line(f"{us} = {bound}")
        return us

    @property
    def parameters(self) -> dict[str, float]:
        return asdict(self)


def fit_joint(data: Training, one: Floats, other: Floats) -> Joint:
    """From the measured batches with both phases, and what each alone is said to take.

    With few of them, all of the shorter phase beyond a launch is added. A chain must bound
    as many batches.
    """
    cheapest = float(data.us.min())
    both = (one > 0) & (other > 0)
    if both.sum() < _FEWEST:
        return Joint(cheapest, 1.0)
    one, other, us = one[both], other[both], data.us[both]
    longest = data.column(LONGEST)[both]
    plain = _best(us, one, other, longest, cheapest, [0.0])
    assert plain is not None
    slopes = np.unique(us / np.maximum(longest, 1.0))
    chosen = np.linspace(0, len(slopes) - 1, min(len(slopes), _MOST_CHAINS)).astype(int)
    chained = _best(us, one, other, longest, cheapest, slopes[chosen].tolist())
    is_worth_it = chained is not None and chained[0] < _GAIN * plain[0]
    return chained[1] if chained is not None and is_worth_it else plain[1]


def _best(
    us: Floats,
    one: Floats,
    other: Floats,
    longest: Floats,
    cheapest: float,
    chains: list[float],
) -> tuple[float, Joint] | None:
    """The mean error in logarithms of the joint that is chosen, and that joint.

    None where no chain bounds as many batches as a parameter needs.
    """
    longer, shorter = np.maximum(one, other), np.minimum(one, other)
    means: list[float] = []
    joints: list[Joint] = []
    for launch in (_LAUNCHES * cheapest).tolist():
        # A row for every share: what `Joint.many` says, of all of them at once.
        together = longer + _SHARES[:, None] * np.maximum(shorter - launch, 0.0)
        for chain in chains:
            bound = chain * longest
            errors = np.abs(np.log(us / np.maximum(together, bound)))
            told = np.full(len(_SHARES), True)
            if chain:
                told = (bound > together).sum(axis=1) >= _FEWEST
            means += errors.mean(axis=1)[told].tolist()
            joints += [Joint(launch, share, chain) for share in _SHARES[told].tolist()]
    if not joints:
        return None
    least = int(np.argmin(means))
    return means[least], joints[least]


def load_joint(parameters: Parameters) -> Joint:
    """Raises KeyError, TypeError or ValueError for parameters of another shape."""
    joint = Joint(
        float(parameters["launch"]),
        float(parameters["share"]),
        float(parameters.get("chain", 0.0)),
    )
    if not (0 <= joint.share <= 1 and joint.launch >= 0 and joint.chain >= 0):
        raise ValueError("a joint needs a launch and a chain above 0 and a share between 0 and 1")
    return joint
