"""Local SGD: workers step alone and average what they have learnt."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.config.choices import Compress
from runner.sync.averaging import AllReduceSum, FlatTensors, VectorSum
from runner.sync.fragment import Fragment, cut
from runner.sync.optimizers import Moments, OuterSGD
from runner.sync.protocol import StepFacts, SyncPolicy
from runner.sync.quantised import OrderedExecutor, QuantisedSum
from runner.sync.rounds import PlannedRounds, Round
from runner.sync.telemetry import SyncHistory, SyncRecord, SyncStats


class LocalSGD(SyncPolicy):
    """Local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little") and its variants.

    Every worker steps alone. Once in each of the `rounds`, and at the end, the workers' updates since the last
    synchronisation are averaged, weighted by the loss terms each has trained on, and added to the common weights.
    Running statistics in `buffers` and `moments` are averaged as well.

    `make_outer`: makes an optimizer of the common weights that steps with the average instead of adding it.
    `accumulate`: weights stay the common ones during a local phase, and updates are added up, as accumulation does with
    gradients. `delay`: optimizer steps during which an average is in flight (Wang et al. 2020, "Overlap Local-SGD");
    they stay on top of the new common weights. 0: workers wait for it. `fragments`: parts of equal size into which the
    weights are cut, and which are synchronised one after the other in a round (Douillard et al. 2025, "Streaming DiLoCo
    with overlapping communication").

    Vectors are laid out as [weights | buffers | moments].
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: Sequence[Tensor],
        backend: Backend,
        compress: Compress,
        rounds: PlannedRounds,
        make_outer: Callable[[Tensor], OuterSGD] | None = None,
        accumulate: bool = False,
        delay: int = 0,
        moments: Moments | None = None,
        fragments: int = 1,
    ) -> None:
        self._delay = delay
        self.forward_model, self.overlaps = model, delay > 0
        self.resolved_settings = {"fragments": fragments, **({"delay": delay} if delay else {})}
        self._backend, self._rounds, self._moments, self._accumulates = backend, rounds, moments, accumulate
        parameters = [p for p in model.parameters() if p.requires_grad]
        others = [[*buffers], *(moments.by_name() if moments is not None else [])]
        self._flat = FlatTensors(list(itertools.chain(parameters, *others)), shared=not backend.compiles)
        replica = self._flat.pack()
        ends = itertools.accumulate([len(parameters), *map(len, others)], initial=0)
        parts = [slice(*pair) for pair in itertools.pairwise(self._flat.bounds[end] for end in ends)]
        # Workers that wait average the whole replica in its own memory. Others need memory for what is sent.
        in_place = fragments == 1 and not self.overlaps
        self._in_order = OrderedExecutor(backend, self.overlaps) if compress is Compress.int8 else None
        make_sum: Callable[[Tensor], VectorSum]
        if self._in_order is not None:
            make_sum = functools.partial(QuantisedSum, backend, self._in_order)
        else:
            make_sum = functools.partial(AllReduceSum, backend, compress, self.overlaps)
        self._fragments = [
            Fragment(
                replica,
                own,
                backend,
                make_sum,
                make_outer,
                accumulate,
                in_place,
                self.overlaps,
            )
            for own in zip(*(cut(part, fragments) for part in parts), strict=True)
        ]
        self._round: Round | None = None
        self._history = SyncHistory()

    @property
    def replicated_keys(self) -> tuple[str, ...]:
        # Otherwise each replica is ahead of the common weights by its own steps.
        if not self._replicas_are_common:
            return ()
        return ("model", "policy") if self._in_order is None else ("model",)  # what rounding took is each worker's

    @property
    def _replicas_are_common(self) -> bool:
        """Whether replicas are equal right after a round."""
        return not self.overlaps and len(self._fragments) == 1

    @torch.no_grad()
    def after_step(self, facts: StepFacts) -> bool:
        for fragment in self._fragments:
            fragment.phase.add(facts)
        if self._accumulates and facts.local_count > 0:
            self._accumulate_update()
        synchronised = self._finish_due(facts.step)
        for number in self._due(facts.step):
            self._start(self._fragments[number], facts.step + self._delay)
        synchronised |= self._finish_due(facts.step)
        return synchronised

    def _due(self, step: int) -> list[int]:
        """The numbers of the fragments whose average starts after this step."""
        if self._round is None or step > self._round.last:
            self._round = self._rounds.start(step)
        return self._round.due(step, len(self._fragments)) if self._round is not None else []

    def _finish_due(self, step: int) -> bool:
        """Apply the averages that are due after this step; True if that ends a round."""
        due = [fragment for fragment in self._fragments if fragment.applied_after == step]
        for fragment in due:
            self._finish(fragment)
        return self._fragments[-1] in due

    def _accumulate_update(self) -> None:
        """Set the updates that this worker has just made aside, to be averaged later."""
        replica = self._flat.pack()
        for fragment in self._fragments:
            fragment.accumulate(replica)
        self._flat.unpack()
        self._backend.mark_step()

    def _start(self, fragment: Fragment, applied_after: int) -> None:
        if fragment.applied_after is not None:  # rounds are long enough, except the first after a resumption
            self._finish(fragment)
        if self._moments is not None:
            self._moments.collect()
        fragment.start(self._flat.pack(), applied_after)

    def _finish(self, fragment: Fragment) -> None:
        replica = self._flat.pack() if self.overlaps else self._flat.memory
        record = fragment.finish(replica)
        self._history.add(record)
        self._flat.unpack()
        if self._moments is not None:
            self._moments.set_step_count(record.step)
        self._backend.mark_step()

    @torch.no_grad()
    def finish(self) -> bool:
        open_phases = [fragment for fragment in self._fragments if fragment.phase.steps > 0]
        in_flight = [fragment for fragment in self._fragments if fragment.applied_after is not None]
        for fragment in in_flight:
            self._finish(fragment)
        for fragment in open_phases:
            self._start(fragment, fragment.phase.last)
            self._finish(fragment)
        return bool(in_flight or open_phases)

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        if self._replicas_are_common:
            yield
            return
        with torch.no_grad():
            replica = self._flat.pack()
            own = replica.clone()
            for fragment in self._fragments:
                fragment.set_common(replica)
            self._flat.unpack()
            self._backend.mark_step()
        yield
        with torch.no_grad():
            replica.copy_(own)
            self._flat.unpack()
            self._backend.mark_step()

    def stats(self) -> SyncStats:
        return self._history.stats

    def take_records(self) -> list[SyncRecord]:
        return self._history.take_records()

    def close(self) -> None:
        if self._in_order is not None:
            self._in_order.close()
        self._flat.release()

    def state_dict(self) -> dict[str, Any]:
        return {
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "round": dataclasses.astuple(self._round) if self._round is not None else None,
            "history": self._history.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for fragment, own in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(own)
        self._round = Round(*state["round"]) if state["round"] is not None else None
        self._history.load_state_dict(state["history"])
