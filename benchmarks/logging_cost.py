"""The cost of logging every step to MLflow's SQLite store, compared with logging to the run's folder only."""

from __future__ import annotations

from side_by_side import interleaved, report

if __name__ == "__main__":
    # The smallest model that ships, so the shortest steps: the cost in percent is an upper bound for real models.
    base = ["device=cpu", "evaluation.every_steps=100000", "epochs=8"]
    found = interleaved({"tracking=none": [*base, "tracking=none"], "tracking=mlflow": base}, 5)
    report(found, "steady_samples_per_s")
    print("\nThe whole run, with MLflow's import and the creation of its database during the first steps:\n")
    report(found, "samples_per_s")
