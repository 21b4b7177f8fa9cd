"""Medians and ranks over the machines of a panel, (M, N), and over blocks of time; for large panels compiled."""

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.peer_scores import peer_median
from rolecall.detector.panels.sequential.elementwise import Array, compiled, helper, in_threads, is_large

CHUNK = 1024
"""Machines: some rows of so many stay in the processor's first cache."""
MAD_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation for a Gaussian."""


def row_medians(x: Array) -> Array:
    """(M, N) -> (M, 1) of finite values: as `np.median`, which is five times slower, since it looks for NaN."""
    if is_large(x.shape[1]):
        found = np.empty((len(x), 1), dtype=np.float32)
        in_threads(compiled(_row_medians), len(x), x, found)
        return found
    half = x.shape[1] // 2
    ordered = np.partition(x, half, axis=1)
    middle = ordered[:, half : half + 1]
    if x.shape[1] % 2 == 0:
        middle = (ordered[:, :half].max(axis=1, keepdims=True) + middle) / 2
    return middle


def _row_medians(first: int, last: int, x: Array, found: Array) -> None:
    for m in range(first, last):
        found[m, 0] = middle_of(in_order(x[m]), x.shape[1])


def medians_of(x: Array, counted: NDArray[np.bool_]) -> Array:
    """(M, N) -> (M, 1): as `row_medians`, of those that are `counted` (M, N); 0 where none is."""
    if counted.all():
        return row_medians(x)
    if not is_large(x.shape[1]):
        return np.nan_to_num(peer_median(np.where(counted, x, np.float32(math.nan))))
    found = np.zeros((len(x), 1), dtype=np.float32)
    in_threads(compiled(_counted_medians), len(x), x, counted, found)
    return found


def _counted_medians(first: int, last: int, x: Array, counted: NDArray[np.bool_], found: Array) -> None:
    shown = np.empty(x.shape[1], dtype=np.float32)
    for m in range(first, last):
        num = 0
        for n in range(len(shown)):
            shown[n] = x[m, n] if counted[m, n] else np.float32(math.inf)
            num += counted[m, n]
        if num > 0:
            found[m, 0] = middle_of(in_order(shown), num)


@helper
def in_order(x: Array) -> Array:
    """Bits of float32 (N,) as integers that are in the order of the values."""
    bits = x.view(np.int32)
    found = np.empty(len(bits), dtype=np.int32)
    for n in range(len(bits)):
        found[n] = bits[n] ^ ((bits[n] >> 31) & 0x7FFFFFFF)
    return found


@helper
def middle_of(x: Array, num: int) -> Any:
    """Median of the `num` values that are finite; the others are +inf. `x`: see `in_order`."""
    low = ranked(x, (num - 1) // 2)
    if num % 2:
        return value_of(low)
    # The next one: the same if there are several.
    pivot, above, not_above = np.int32(low), np.int32(0x7FFFFFFF), 0
    for n in range(len(x)):
        not_above += x[n] <= pivot
        above = min(above, x[n] if x[n] > pivot else np.int32(0x7FFFFFFF))
    return value_of(low) if not_above > num // 2 else (value_of(low) + value_of(np.int64(above))) * np.float32(0.5)


@helper
def ranked(x: Array, rank: int) -> Any:
    """The value of this rank, from 0, by bisection: it reads the row some 25 times, but in vector instructions, which
    takes a fifth of the time of a selection that moves values. `x`: see `in_order`."""
    least, most = x[0], x[0]
    for n in range(len(x)):
        least, most = min(least, x[n]), max(most, x[n])
    low, high = np.int64(least), np.int64(most)
    while low < high:
        middle = (low + high) >> 1
        pivot, not_above = np.int32(middle), 0
        for n in range(len(x)):
            not_above += x[n] <= pivot
        if not_above > rank:
            high = middle
        else:
            low = middle + 1
    return low


@helper
def value_of(ordered: Any) -> Any:
    """Of an integer of `in_order`."""
    return np.int32(ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(np.float32)


def largest(x: Array, num: int) -> Array:
    """(M, N) -> (num, N): the largest of each column, in descending order."""
    if not is_large(x.shape[1]):
        return np.sort(x, axis=0)[: -num - 1 : -1]
    top = np.full((num, x.shape[1]), -np.inf, dtype=np.float32)
    in_threads(compiled(_insert), x.shape[1], x, top)
    return top


def _insert(first: int, last: int, x: Array, top: Array) -> None:
    """Inserts the rows into `top`: all columns of a part at once, while it is in the cache."""
    row = np.empty(CHUNK, dtype=np.float32)
    for start in range(first, last, CHUNK):
        num = min(CHUNK, last - start)
        for m in range(len(x)):
            row[:num] = x[m, start : start + num]
            for i in range(len(top)):
                place = top[i, start : start + num]
                for n in range(num):
                    most, new = place[n], row[n]
                    place[n] = max(most, new)
                    row[n] = min(most, new)


def middles(blocks: Array) -> Array:
    """(blocks, M, N) -> (M, N): median of the blocks that are known, NaN where none is."""
    if not is_large(blocks.shape[2]):
        x: Array = np.median(blocks, axis=0)
        holes = np.isnan(x)
        if holes.any():
            some = holes & ~np.isnan(blocks).all(axis=0)
            x[some] = np.nanmedian(blocks[:, some], axis=0)
        return x
    found = np.empty(blocks.shape[1:], dtype=np.float32)
    in_threads(compiled(_middles), blocks.shape[1], blocks, _comparisons(len(blocks)), found)
    return found


@cache
def _comparisons(num: int) -> NDArray[np.int64]:
    """Pairs of places that sort `num` values when each pair is put in order, in turn (Batcher's merge exchange, Knuth
    5.2.2M): the same for all, so that many are sorted at once."""
    most = 1 << max(0, num - 1).bit_length() >> 1
    pairs, p = list[tuple[int, int]](), most
    while p > 0:
        q, r, d = most, 0, p
        while d > 0:
            pairs += [(i, i + d) for i in range(num - d) if i & p == r]
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _middles(first: int, last: int, blocks: Array, pairs: NDArray[np.int64], found: Array) -> None:
    num = len(blocks)
    part = np.empty((num, CHUNK), dtype=np.float32)
    for m in range(first, last):
        for start in range(0, blocks.shape[2], CHUNK):
            size = min(CHUNK, blocks.shape[2] - start)
            for i in range(num):
                values, row = blocks[i, m, start : start + size], part[i]
                for n in range(size):
                    row[n] = np.float32(np.inf) if np.isnan(values[n]) else values[n]
            for k in range(len(pairs)):
                low, high = part[pairs[k, 0]], part[pairs[k, 1]]
                for n in range(size):
                    a, b = low[n], high[n]
                    low[n] = min(a, b)
                    high[n] = max(a, b)
            low, high, middle = part[(num - 1) // 2], part[num // 2], found[m, start : start + size]
            for n in range(size):
                middle[n] = (low[n] + high[n]) * np.float32(0.5)
            unknown, row = 0, part[num - 1]
            for n in range(size):
                unknown += row[n] == np.inf
            for n in range(size if unknown else 0):
                known = num
                while known > 0 and part[known - 1, n] == np.inf:
                    known -= 1
                both = part[(known - 1) // 2, n] + part[known // 2, n]
                middle[n] = both * np.float32(0.5) if known else np.float32(np.nan)


def spread_of(x: Array, peers: NDArray[np.bool_], rank: int) -> tuple[Array, Array, Array]:
    """(L, 1) each: median of `x` over the peers (L, N), their deviation from it, and that of the next after `rank`
    farthest ones; 0 where none is known."""
    found = np.zeros((3, len(x), 1), dtype=x.dtype)
    if is_large(x.shape[1]):
        in_threads(compiled(_spread_rows), len(x), x, peers, rank, found)
    else:
        shown = np.where(peers, x, np.nan)
        found[0] = np.nan_to_num(peer_median(shown))
        apart = np.abs(shown - found[0])
        found[1] = np.nan_to_num(MAD_TO_SIGMA * peer_median(apart))
        found[2] = np.sort(np.where(peers, apart, 0), axis=1)[:, max(-1 - rank, -x.shape[1]), None]
    return found[0], found[1], found[2]


def _spread_rows(first: int, last: int, x: Array, peers: NDArray[np.bool_], rank: int, found: Array) -> None:
    shown = np.empty(x.shape[1], dtype=np.float32)
    for m in range(first, last):
        row, counted, num = x[m], peers[m], 0
        for n in range(len(row)):
            shown[n] = row[n] if counted[n] else np.float32(math.inf)
            num += counted[n]
        if num > 0:
            middle = middle_of(in_order(shown), num)
            for n in range(len(row)):
                shown[n] = abs(shown[n] - middle)
            apart = in_order(shown)
            found[0, m, 0] = middle
            found[1, m, 0] = np.float32(MAD_TO_SIGMA) * middle_of(apart, num)
            found[2, m, 0] = value_of(ranked(apart, num - 1 - rank)) if num > rank else np.float32(0)
