"""splitmix64, a hash of 64-bit integers: independent pseudo-random numbers from a seed and the indices of a task.

Source: G. L. Steele Jr., D. Lea and C. H. Flood, Fast splittable pseudorandom number generators, OOPSLA 2014, with the
constants of D. Stafford's variant 13.
"""

from __future__ import annotations

__all__ = ["branch_seed", "splitmix64"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """The 64 bits that the generator gives next from ``state``, of which the lowest 64 bits count."""
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def branch_seed(seed: int, index: int) -> int:
    """A 63-bit seed for branch ``index`` of ``seed``: different for each index."""
    return splitmix64(seed + index * _GOLDEN) & (_MASK >> 1)
