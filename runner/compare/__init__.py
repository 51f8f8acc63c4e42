"""`python -m runner.compare`: what a set of runs says about setups, and how surely."""
