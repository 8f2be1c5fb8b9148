"""What belongs to a configuration in an environment: live steps, KV capacity, runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from dooly_backend.database import rows
from dooly_backend.database.records import (
    ClockStep,
    HostStep,
    KvCapacity,
    PartCost,
    RunConditions,
    StepCost,
    StepMeasurement,
    StreamStep,
)
from dooly_backend.database.rows import insertion, matching
from dooly_backend.database.session import Session


class PlaceStore(Session):
    """The part of the latency database that is kept by configuration and environment."""

    # -- writing ---------------------------------------------------------------

    def record_step(
        self,
        configuration_id: int,
        environment_id: int,
        step: StepMeasurement,
        *,
        replace: bool = False,
    ) -> bool:
        """Store a live step; true when it was stored.

        A step of the same batch and layers is kept unless `replace`. Raises
        InputError for samples that are no times.
        """
        place = {"configuration_id": configuration_id, "environment_id": environment_id}
        columns = place | rows.step_columns(step)
        key = place | {"batch": step.batch.key, "num_layers": step.num_layers}
        with self.writing():
            if self._exists("step_measurement", key):
                if not replace:
                    return False
                self._delete("step_measurement", key)
            self._execute(insertion("step_measurement", columns), columns)
        return True

    def set_step_cost(self, configuration_id: int, environment_id: int, cost: StepCost) -> None:
        """Store the fitted cost of a step, in place of an earlier fit."""
        key = {"configuration_id": configuration_id, "environment_id": environment_id}
        columns = key | rows.step_cost_columns(cost)
        with self.writing():
            self._delete("step_cost", key)
            self._execute(insertion("step_cost", columns), columns)

    def record_stream_step(
        self, configuration_id: int, environment_id: int, step: StreamStep, add: bool = False
    ) -> bool:
        """Store a step in a row; false where the same batch and layers are known.

        With `add` its samples then go to the known ones: a host is quicker in one minute
        than in another. Raises InputError for samples that are no times.
        """
        key = {
            "configuration_id": configuration_id,
            "environment_id": environment_id,
            "batch": step.batch.key,
            "num_layers": step.num_layers,
        }
        with self.writing():
            found = self._execute(f"SELECT * FROM stream_step WHERE {matching(key)}", key)
            known = found.fetchone()
            if known is not None and not add:
                return False
            if known is not None:
                step = rows.stream_step_of(known).with_samples_of(step)
                self._delete("stream_step", key)
            columns = key | rows.stream_step_columns(step)
            self._execute(insertion("stream_step", columns), columns)
            return known is None

    def record_host_step(self, configuration_id: int, environment_id: int, step: HostStep) -> None:
        """Store the host's part of a step, in place of an earlier one of as many requests.

        Raises InputError for samples that are no times.
        """
        key = {
            "configuration_id": configuration_id,
            "environment_id": environment_id,
            "num_reqs": step.num_reqs,
        }
        columns = key | rows.host_step_columns(step)
        with self.writing():
            self._delete("host_step", key)
            self._execute(insertion("host_step", columns), columns)

    def set_stream_cost(
        self, configuration_id: int, environment_id: int, costs: Sequence[PartCost]
    ) -> None:
        """Store what was fitted to steps in a row, in place of an earlier fit."""
        key = {"configuration_id": configuration_id, "environment_id": environment_id}
        with self.writing():
            self._delete("stream_cost", key)
            for cost in costs:
                columns = key | rows.part_cost_columns(cost)
                self._execute(insertion("stream_cost", columns), columns)

    def record_clock(
        self, configuration_id: int, environment_id: int, steps: Sequence[ClockStep]
    ) -> None:
        """Store steps in a row, in place of earlier ones of the same patterns and depth.

        Raises InputError for steps that are no times.
        """
        place = {"configuration_id": configuration_id, "environment_id": environment_id}
        with self.writing():
            for _, of_pattern in groupby(steps, key=lambda step: (step.num_layers, step.pattern)):
                columns = rows.clock_columns(list(of_pattern))
                key = place | {name: columns[name] for name in ("num_layers", "pattern")}
                self._delete("clock_row", key)
                self._execute(insertion("clock_row", place | columns), place | columns)

    def record_run(self, configuration_id: int, environment_id: int, run: RunConditions) -> None:
        """Store how device and host were during a run, in place of an earlier state of it."""
        key = {
            "configuration_id": configuration_id,
            "environment_id": environment_id,
            "started_at": run.started_at,
        }
        columns = key | rows.run_columns(run)
        with self.writing():
            self._delete("run_conditions", key)
            self._execute(insertion("run_conditions", columns), columns)

    def set_kv_capacity(
        self, configuration_id: int, environment_id: int, capacity: KvCapacity
    ) -> None:
        """Store what decides the number of KV blocks, in place of an earlier one."""
        key = {"configuration_id": configuration_id, "environment_id": environment_id}
        columns = key | rows.kv_capacity_columns(capacity)
        with self.writing():
            self._delete("kv_capacity", key)
            self._execute(insertion("kv_capacity", columns), columns)

    # -- reading ---------------------------------------------------------------

    def steps(self, configuration_id: int, environment_id: int) -> list[StepMeasurement]:
        """The live steps of a configuration in one environment."""
        with self.reading():
            found = self._execute(
                "SELECT * FROM step_measurement WHERE configuration_id = ?"
                " AND environment_id = ? ORDER BY num_layers, batch",
                (configuration_id, environment_id),
            )
            return [rows.step_of(row) for row in found]

    def step_cost(self, configuration_id: int, environment_id: int) -> StepCost | None:
        """The fitted cost of a step; None before a fit."""
        with self.reading():
            row = self._execute(
                "SELECT * FROM step_cost WHERE configuration_id = ? AND environment_id = ?",
                (configuration_id, environment_id),
            ).fetchone()
            return row and rows.step_cost_of(row)

    def stream_steps(self, configuration_id: int, environment_id: int) -> list[StreamStep]:
        """The steps in a row of a configuration in one environment."""
        found = self._of_place("stream_step", configuration_id, environment_id, "num_layers, rowid")
        return [rows.stream_step_of(row) for row in found]

    def host_steps(self, configuration_id: int, environment_id: int) -> list[HostStep]:
        """The host's part of steps, few requests first."""
        found = self._of_place("host_step", configuration_id, environment_id, "num_reqs")
        return [rows.host_step_of(row) for row in found]

    def stream_cost(self, configuration_id: int, environment_id: int) -> tuple[PartCost, ...]:
        """What was fitted to steps in a row; nothing before a fit."""
        found = self._of_place("stream_cost", configuration_id, environment_id, "mode, part")
        return tuple(rows.part_cost_of(row) for row in found)

    def clock_steps(self, configuration_id: int, environment_id: int) -> list[ClockStep]:
        """Steps in a row that show how the device's clock gives way, pattern by pattern."""
        found = self._of_place("clock_row", configuration_id, environment_id, "num_layers, rowid")
        return [step for row in found for step in rows.clock_steps_of(row)]

    def _of_place(
        self, table: str, configuration_id: int, environment_id: int, order: str
    ) -> list[rows.Row]:
        with self.reading():
            return self._execute(
                f"SELECT * FROM {table} WHERE configuration_id = ? AND environment_id = ?"
                f" ORDER BY {order}",
                (configuration_id, environment_id),
            ).fetchall()

    def runs(self, configuration_id: int, environment_id: int) -> list[RunConditions]:
        """The runs that measured a configuration in one environment, oldest first."""
        with self.reading():
            found = self._execute(
                "SELECT * FROM run_conditions WHERE configuration_id = ? AND environment_id = ?"
                " ORDER BY started_at",
                (configuration_id, environment_id),
            )
            return [rows.run_of(row) for row in found]

    def kv_capacity(self, configuration_id: int, environment_id: int) -> KvCapacity | None:
        """What decides how many KV blocks the full model has; None where it is not known.

        ``kv_capacity(...).num_blocks(gpu_memory_utilization=0.9)`` counts them.
        """
        with self.reading():
            row = self._execute(
                "SELECT * FROM kv_capacity WHERE configuration_id = ? AND environment_id = ?",
                (configuration_id, environment_id),
            ).fetchone()
            return row and rows.kv_capacity_of(row)
