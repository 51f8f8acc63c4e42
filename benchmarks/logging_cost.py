"""What does logging every step to MLflow's SQLite store cost, against logging to the run's folder only?"""

from __future__ import annotations

from side_by_side import interleaved, report

if __name__ == "__main__":
    # The smallest model that ships, so the shortest steps: the cost in percent is an upper bound for real models.
    base = ["device=cpu", "evaluation.every_steps=100000", "epochs=4"]
    report(interleaved({"tracking=none": [*base, "tracking=none"], "tracking=mlflow": base}, 7), "samples_per_s")
