"""`batch.order=keyed`: a permutation that is computed at any position, and the hash that it is made of."""

from __future__ import annotations

import math

import numpy as np

#: With 24 rounds the orders of up to 6 samples come equally often within 0.5%; more samples need fewer rounds.
_ROUNDS = 24
#: Positions whose ids are computed at once: for a single batch most of the time would be NumPy's overhead per call.
_BLOCK = 8192
#: Blocks kept: the loader is ahead of the step, and the ledger behind it.
_KEPT = 4
#: Of `hashed`; made once, since batches are small.
_ONE, _GOLDEN = np.uint64(1), np.uint64(0x9E3779B97F4A7C15)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


class KeyedPermutation:
    """A pseudo-random permutation of 0 … samples - 1, in constant memory and time per position.

    A Feistel network on pairs of digits: position = left × height + right, with width × height just above the number
    of samples. Each round adds a hash of one digit to the other one, modulo its base, which can be undone. What ends
    beyond the samples goes through the network again (cycle walking), so that each sample has one position.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        self._samples = samples
        root = math.isqrt(max(samples - 1, 0)) + 1
        self._width = root + root % 2  # adding modulo odd numbers only gives even permutations only
        self._height = max(-(-samples // self._width), 1)
        # It tells seed and epoch apart, see `order.permutation`.
        self._keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
        self._blocks: dict[int, np.ndarray] = {}

    def ids(self, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop`; int64 of shape [stop - start]."""
        blocks = []
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            first = number * _BLOCK
            blocks.append(self._ids_of_block(number)[max(start - first, 0) : stop - first])
        return blocks[0] if len(blocks) == 1 else np.concatenate([np.zeros(0, dtype=np.int64), *blocks])

    def _ids_of_block(self, number: int) -> np.ndarray:
        if number not in self._blocks:
            if len(self._blocks) == _KEPT:
                del self._blocks[next(iter(self._blocks))]
            start = number * _BLOCK
            self._blocks[number] = self._at(np.arange(start, min(start + _BLOCK, self._samples), dtype=np.uint64))
        return self._blocks[number]

    def _at(self, positions: np.ndarray) -> np.ndarray:
        values = self._network(positions)
        while (outside := values >= self._samples).any():
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        height = np.uint64(self._height)
        left, right = values // height, values % height
        for first, second in self._keys.reshape(-1, 2):
            left = _shifted(left, hashed(right, first), self._width)
            right = _shifted(right, hashed(left, second), self._height)
        return left * height + right


def _shifted(digits: np.ndarray, by: np.ndarray, base: int) -> np.ndarray:
    """Digits plus hashes, modulo `base`, which is at most 2³²."""
    digits = digits + ((by >> np.uint64(32)) * np.uint64(base) >> np.uint64(32))
    return np.where(digits >= base, digits - np.uint64(base), digits)


def hashed(values: np.ndarray, key: np.uint64 | np.ndarray) -> np.ndarray:
    """Hash 64-bit integers under a key, or each under its own; uint64 of the shape of `values`.

    The finaliser of SplitMix64 over key + (value + 1) × golden ratio.
    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", with Stafford's variant 13.
    """
    x = (values + _ONE) * _GOLDEN + key
    x ^= x >> _SHIFTS[0]
    x *= _MIX_A
    x ^= x >> _SHIFTS[1]
    x *= _MIX_B
    x ^= x >> _SHIFTS[2]
    return x
