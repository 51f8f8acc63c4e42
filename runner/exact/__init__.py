"""`equivalence=exact`: dropout that is independent of how a batch is split into workers and micro-batches."""

from runner.exact.dropout import DropoutStreams, ExactDropout, exact_streams, rows_per_sample, standard_streams
from runner.exact.probe import check_model

__all__ = ["DropoutStreams", "ExactDropout", "check_model", "exact_streams", "rows_per_sample", "standard_streams"]
