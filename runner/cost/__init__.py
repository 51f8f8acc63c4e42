"""The cost model: what a step computes, sends and takes, and what a run needs. Pure arithmetic; measures nothing."""
