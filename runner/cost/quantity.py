"""A number that is not known exactly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """A predicted number and the interval in which it is expected."""

    value: float
    low: float
    high: float

    @staticmethod
    def around(value: float, factor: float) -> Quantity:
        """The interval from value ÷ factor to value × factor."""
        return Quantity(value, value / factor, value * factor)

    def __add__(self, other: Quantity | float) -> Quantity:
        value, low, high = _numbers(other)
        return Quantity(self.value + value, self.low + low, self.high + high)

    def __mul__(self, other: Quantity | float) -> Quantity:
        value, low, high = _numbers(other)
        return Quantity(self.value * value, self.low * low, self.high * high)


def _numbers(one: Quantity | float) -> tuple[float, float, float]:
    return (one.value, one.low, one.high) if isinstance(one, Quantity) else (one, one, one)
