"""Which setups may be compared, from certificates made by hand."""

from __future__ import annotations

from runner.tools.compare.comparability import comparability
from runner.tools.compare.runs import CertificateProperty
from tests.tools.compare.make import block, certificate, run

BASE = [run("one", seed, 80.0 + seed, certificate=certificate(seed=seed)) for seed in (0, 1)]


def test_only_workers_differ() -> None:
    """World size and device: equivalent, nothing to list."""
    four = [run("four", seed, 80.0, certificate=certificate(seed=seed, world_size=4)) for seed in (0, 1)]
    assert comparability(four, BASE).text == "equivalent"


def test_shards_make_other_workers_identical() -> None:
    """But not in other respects, nor compared with a run that has none."""
    one, four = (certificate(workers_allow="identical", world_size=workers) for workers in (1, 4))
    base, other = run("one", 0, 80.0, certificate=one), run("four", 0, 80.0, certificate=four)
    assert comparability([other], [base]).level == "identical"
    assert comparability([base], [base]).level == "identical"
    elsewhere = certificate(workers_allow="identical", world_size=4, device="cuda")
    assert comparability([run("gpu4", 0, 80.0, certificate=elsewhere)], [base]).level == "equivalent"


def test_what_differs_is_listed_in_a_word() -> None:
    """Numbers as ratios, short words unchanged."""
    changed = {"global_batch": 192, "learning_rate": 0.004, "precision": "bf16", "world_size": 4}
    four = [run("four", 0, 80.0, certificate=certificate(**changed))]
    assert comparability(four, BASE).text == "comparable: global_batch × 4, learning_rate × 4, precision bf16"


def test_a_pair_that_is_not_comparable_gets_no_verdict() -> None:
    """Fewer samples seen: the reason with both numbers, and neither difference, verdict nor speed-up."""
    certificates = [certificate(seed=seed, samples_seen=500) for seed in (0, 1)]
    four = [run("four", seed, 80.0, workers=4, certificate=one) for seed, one in enumerate(certificates)]
    found = block(BASE, four)
    row = found.rows[1]
    assert (row.difference, row.speed_up) == (None, None)
    assert row.verdict is not None
    assert row.verdict.text == "no verdict: not comparable"
    assert any("samples_seen 500, baseline 1,000" in flag.text for flag in found.flags)


def test_one_seed_is_enough_to_forbid_it() -> None:
    """Only seed 1 stopped early: the reason names the seed."""
    certificates = [certificate(seed=0), certificate(seed=1, samples_seen=500)]
    four = [run("four", seed, 80.0, certificate=one) for seed, one in enumerate(certificates)]
    relation = comparability(four, BASE)
    assert relation.forbids
    assert relation.reasons == ("samples_seen 500, baseline 1,000 (seed 1)",)


def test_seeds_are_ignored_where_none_pair() -> None:
    """Seeds 5 and 6 against 0 and 1: `seed` and the seed in the data order are no difference; a batch still is."""
    order = "seed 5, cut by 48"
    four = [run("four", 5, 80.0, certificate=certificate(seed=5, data_order=order))]
    assert comparability(four, BASE).text == "equivalent"
    larger = certificate(seed=5, data_order="seed 5, cut by 96", global_batch=96)
    assert comparability([run("four", 5, 80.0, certificate=larger)], BASE).text == (
        "comparable: global_batch × 2, data_order cut by 96"
    )


def test_a_withdrawn_certificate_is_not_comparable() -> None:
    """The ledger was not sound, on either side."""
    bad = run("four", 0, 80.0, certificate=certificate(), withdrawn="the ledger is not sound")
    assert comparability([bad], BASE).reasons == ("certificate of seed 0 was withdrawn: the ledger is not sound",)
    assert comparability(BASE, [bad]).forbids


def test_certificates_of_different_versions() -> None:
    """A property that only one side records is unknown, no difference; without a certificate nothing is known."""
    newer = {**certificate(), "compile": CertificateProperty(False, "comparable")}
    relation = comparability([run("four", 0, 80.0, certificate=newer)], BASE)
    assert (relation.level, relation.unknown) == ("equivalent", ("compile",))
    assert comparability([run("four", 0, 80.0)], BASE).text == "unknown: no certificate"


def test_one_common_seed_judges_the_others_too() -> None:
    """The difference is then not paired, so every run counts: one without a partner that saw less forbids it."""
    same = run("four", 0, 80.0, certificate=certificate(world_size=4))
    less = run("four", 7, 80.0, certificate=certificate(seed=7, samples_seen=500))
    relation = comparability([same, less], BASE)
    assert relation.forbids
    assert "seed 7" in relation.reasons[0]
