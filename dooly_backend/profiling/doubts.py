"""Measurements that others contradict: less work that took longer, or as much of it.

A slow phase of the host that lasts as long as a point's samples shows in none
of their spreads. It shows beside a larger point that took less time, and in what
the points around it predict; a kernel that is really slower for an odd size looks
the same, so such points are measured once more, later, and the quicker of the two
measurements is kept: disturbances only add time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dooly_backend.database.records import Measurement, Signature
from dooly_backend.profiling.evidence import Evidence
from dooly_backend.profiling.families import all_planes
from dooly_backend.workload import WorkloadPoint

#: A point is in doubt where more work of the same kind took less than this share of its time.
SHARE = 0.9
#: Shorter calls are not doubted: their differences are the timer's. Microseconds.
SHORTEST_US = 5.0
#: A point surprises where it took longer than predicted by more than this share.
SURPRISE = 0.15


def doubtful(
    signature: Signature,
    measurements: Sequence[Measurement],
    fresh: Collection[WorkloadPoint],
    longest: int,
) -> list[WorkloadPoint]:
    """Those of `fresh` that took longer than a larger point at the same depth.

    `longest` is the most tokens of a request.
    """
    found = []
    for plane in all_planes(signature, longest):
        known = [(plane.place(m.point), m) for m in measurements]
        for place, measurement in known:
            if place is None or measurement.point not in fresh:
                continue
            larger = [
                other.median_us
                for at, other in known
                if at is not None and at[0] > place[0] and at[1] == place[1]
            ]
            limit = SHARE * measurement.median_us
            if measurement.median_us > SHORTEST_US and min(larger, default=limit) < limit:
                found.append(measurement.point)
    return found


def surprising(evidence: Evidence, fresh: Collection[WorkloadPoint]) -> list[WorkloadPoint]:
    """Those of `fresh` that took longer than all other points predict."""
    found = []
    for index, measurement in enumerate(evidence.measurements):
        if measurement.point not in fresh or measurement.median_us <= SHORTEST_US:
            continue
        predicted = evidence.from_the_others(index)
        if predicted is not None and measurement.median_us > (1 + SURPRISE) * predicted:
            found.append(measurement.point)
    return found
