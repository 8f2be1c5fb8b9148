"""What belongs to a configuration in an environment: live steps, KV capacity, runs."""

from __future__ import annotations

from dooly_backend.database import rows
from dooly_backend.database.records import KvCapacity, RunConditions, StepCost, StepMeasurement
from dooly_backend.database.rows import insertion
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
