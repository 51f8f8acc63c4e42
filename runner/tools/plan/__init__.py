"""`runner.plan`: the plan of a setup, or a ranking of several, without training."""
