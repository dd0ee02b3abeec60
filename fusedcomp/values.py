"""Plain values: numpy's scalars stand for Python's; True is no number, 1 is no flag."""

from numbers import Integral, Real
from typing import Any


def is_number(value: Any) -> bool:
    """An int, a float, or what stands for one; 10**400 is none, for no float holds it."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_count(value: Any) -> bool:
    """An integer >= 0."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def is_flag(value: Any) -> bool:
    """True or False."""
    return isinstance(value, bool) or (str(getattr(value, "dtype", "")) == "bool" and value.ndim == 0)


def plain(value: Any) -> Any:
    """The int, float or bool that a value stands for; anything else as it is."""
    if is_flag(value):
        return bool(value)
    if not is_number(value):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
