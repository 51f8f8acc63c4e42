"""`runner.evaluate` and `runner.predict`: run a saved model over data, as a training run evaluates."""
