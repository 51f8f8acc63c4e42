"""`runner.evidence`: bundles of what runs have recorded, and what can be recomputed from them."""
