"""The plan of an update: which items go through the model together, on which rank, in which micro step.

All ranks wait for the slowest one at every micro step, so what an update costs is the sum over micro steps of the costliest bin. The
planner therefore fills steps x ranks bins under a hard cap of tokens and puts bins of like cost into one micro step:

1. Peel: while the costliest item left costs more than an even share of what is left, it sets the pace of a micro step of its own; the
   ranks next to it take the next costliest items and are filled up to that pace, because their time is paid for anyway.
2. Spread: every other bin gets one of the costliest items left; the rest go, costliest first, to the bin furthest below its target
   (longest processing time first; Graham 1969). Targets are a water level, lower where the cap would be reached first.
3. Repair: what fitted nowhere is put where most room is, and swaps move the overflow on until no bin is over the cap; a bin that
   has just been relieved takes nothing for a while (tabu search; Glover 1989).
4. Refine: bins in order of cost form the micro steps; swaps inside a micro step level what is left.

Guarantees: no bin over the capacity; every rank has the same number of micro steps; an empty bin only where there are fewer items
than bins; no fewer items than micro steps; the same input gives the same plan (searches end by counts, never by a clock). Limitations:
optimality. The number of micro steps is the lower bound of Martello and Toth (1990, L2) wherever the repair succeeds, which it did in
every draw of the benchmark, up to rows that must be 99.9 % full (benchmarks/RESULTS.md). What no plan can avoid: a micro step with one
item as long as a row, whose ranks can't hold as much work next to it. Shapes: I items.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_REPAIRS = 300
"""Swaps that a repair may take; most need fewer than 60."""
_TENURE = 12
"""Swaps for which a relieved bin takes nothing; 4 to 30 make little difference."""
_REFINEMENTS = 6
"""Swaps a bin that refining a micro step may take."""
_EVEN = 0.002
"""A micro step is even when its slowest rank is this little above the mean."""
_LAST = 64
"""Items of a bin that a swap considers, the cheapest ones: bins of many small items are even without a search over all pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Items:
    tokens: list[int]
    costs: list[float]
    capacity: int
    ranks: int


class _Bins:
    """Bins being filled."""

    __slots__ = ("costs", "items", "tokens")

    def __init__(self, number: int) -> None:
        self.items: list[list[int]] = [[] for _ in range(number)]
        self.tokens = [0] * number
        self.costs = [0.0] * number

    def put(self, item: int, into: int, of: _Items) -> None:
        self.items[into].append(item)
        self.tokens[into] += of.tokens[item]
        self.costs[into] += of.costs[item]

    def take(self, item: int, out_of: int, of: _Items) -> None:
        self.items[out_of].remove(item)
        self.tokens[out_of] -= of.tokens[item]
        self.costs[out_of] -= of.costs[item]


def plan_bins(tokens_I: Sequence[int], costs_I: Sequence[float], capacity: int, ranks: int) -> list[list[list[int]]]:
    """Item indices by micro step and rank; micro steps from the costliest down.

    Args:
        tokens_I: What the cap counts.
        costs_I: What a bin's time is proportional to, the sum over its items.
        capacity: Tokens that a bin may hold.
        ranks: Bins of a micro step.

    Raises:
        ValueError: an item is larger than the capacity, or there is no rank.
    """
    items = _Items(tokens=[int(t) for t in tokens_I], costs=[float(c) for c in costs_I], capacity=capacity, ranks=ranks)
    if ranks < 1:
        raise ValueError(f"a plan needs at least one rank, not {ranks}")
    if len(items.costs) != len(items.tokens):
        raise ValueError(f"{len(items.tokens)} items have {len(items.costs)} costs")
    for item, tokens in enumerate(items.tokens):
        if tokens > capacity:
            raise ValueError(f"item {item} has {tokens} tokens, a row holds {capacity}")
    if not items.tokens:
        return []
    order = sorted(range(len(items.tokens)), key=lambda i: (-items.costs[i], -items.tokens[i], i))
    steps = -(-fewest_bins(items.tokens, capacity) // ranks)
    while True:
        bins = _Bins(steps * ranks)
        left = _fill(bins, order, items)
        if not left or _repair(bins, left, items):
            break
        steps += 1
    _fill_empty(bins, items)
    by_cost = sorted(range(steps * ranks), key=lambda b: (-bins.costs[b], b))
    plan = []
    for start in range(0, steps * ranks, ranks):
        step = by_cost[start : start + ranks]
        _refine(bins, step, items)
        step.sort(key=lambda b: (-bins.costs[b], b))
        if bins.items[step[0]]:
            plan.append([sorted(bins.items[b]) for b in step])
    return plan


def fewest_bins(tokens_I: Sequence[int], capacity: int) -> int:
    """No plan has fewer bins: the bound L2 of Martello and Toth (1990).

    For every size k, items over capacity - k stand alone, no two items over capacity / 2 share a bin, and the items from k to
    capacity / 2 need at least what room those leave.
    """
    sizes_I = np.sort(np.asarray(tokens_I, np.int64))
    sums = np.concatenate([[0], np.cumsum(sizes_I)])
    halves = int(np.searchsorted(sizes_I, capacity // 2, "right"))
    k = np.concatenate([[0], sizes_I[:halves]])
    alone = np.searchsorted(sizes_I, capacity - k, "right")
    least = np.searchsorted(sizes_I, k, "left")
    room = (alone - halves) * capacity - (sums[alone] - sums[halves])
    over = np.maximum(0, sums[halves] - sums[least] - room)
    return int((len(sizes_I) - halves + -(-over // capacity)).max())


def _fill(bins: _Bins, order: list[int], of: _Items) -> list[int]:
    """Peel, then spread.

    Returns:
        The items that fitted nowhere.
    """
    number = len(bins.items)
    tokens_I, costs_I = np.array(of.tokens)[order], np.array(of.costs)[order]
    free_I = np.ones(len(order), np.bool_)
    total = sum(of.costs)
    first = 0
    while first < number and free_I.any():
        at = int(free_I.argmax())
        pace = float(costs_I[at])
        # A little above an even share, or equal items would be peeled.
        if pace <= total / (number - first) * (1 + 1e-6):
            break
        step = range(first, first + of.ranks)
        for b, seed in zip(step, np.flatnonzero(free_I)[: of.ranks].tolist(), strict=False):
            bins.put(order[seed], b, of)
            free_I[seed] = False
        for b in step:
            while True:
                fits = free_I & (tokens_I <= of.capacity - bins.tokens[b]) & (costs_I <= pace - bins.costs[b])
                costliest = int(fits.argmax())
                if not fits[costliest]:
                    break
                bins.put(order[costliest], b, of)
                free_I[costliest] = False
            total -= bins.costs[b]
        first += of.ranks
    return _spread(bins, first, [order[i] for i in np.flatnonzero(free_I).tolist()], of)


def _spread(bins: _Bins, first: int, rest: list[int], of: _Items) -> list[int]:
    """Longest processing time first into the bins from `first` on; the items that fitted nowhere."""
    number = len(bins.items)
    if first >= number:
        return rest
    for b, item in enumerate(rest[: number - first], first):
        bins.put(item, b, of)
    rest = rest[number - first :]
    if not rest:
        return []
    targets = _targets(bins, first, rest, of)
    below = [(bins.costs[b] - target, b) for b, target in enumerate(targets, first)]
    heapq.heapify(below)
    parked: list[tuple[int, float, int]] = []  # bins too full for an item, most room first, until one comes that fits
    left = []
    for item in rest:
        tokens = of.tokens[item]
        while parked and -parked[0][0] >= tokens:
            heapq.heappush(below, heapq.heappop(parked)[1:])
        while below and bins.tokens[below[0][1]] + tokens > of.capacity:
            gap, b = heapq.heappop(below)
            heapq.heappush(parked, (bins.tokens[b] - of.capacity, gap, b))
        if below:
            gap, b = below[0]
            bins.put(item, b, of)
            heapq.heapreplace(below, (gap + of.costs[item], b))
        else:
            left.append(item)
    return left


def _targets(bins: _Bins, first: int, rest: list[int], of: _Items) -> list[float]:
    """What each bin should cost in the end, so that the micro steps' paces add up to the least.

    Shapes: S micro steps, K ranks. A bin can cost what its room filled with an average of the rest makes of it, no more. Raising
    the pace of a micro step uses only those of its bins that are not full by then; so all micro steps are raised together, first
    as long as all their bins take part, then as long as all but one do, and so on.
    """
    seeds_SK = np.array(bins.costs[first:]).reshape(-1, of.ranks)
    room_SK = of.capacity - np.array(bins.tokens[first:]).reshape(-1, of.ranks)
    work = sum(of.costs[i] for i in rest)
    full_SK = seeds_SK + room_SK * (work / sum(of.tokens[i] for i in rest))
    total = seeds_SK.sum() + work
    pace_S = seeds_SK.max(axis=1)
    for limit_S in np.sort(full_SK, axis=1).T:
        low, high = 0.0, float(limit_S.max())
        raised_S = np.maximum(pace_S, limit_S)
        if np.minimum(raised_S[:, None], full_SK).sum() >= total:
            for _ in range(24):
                middle = (low + high) / 2
                raised_S = np.maximum(pace_S, np.minimum(middle, limit_S))
                low, high = (middle, high) if np.minimum(raised_S[:, None], full_SK).sum() < total else (low, middle)
            pace_S = np.maximum(pace_S, np.minimum(high, limit_S))
            break
        pace_S = raised_S
    return [float(target) for target in np.minimum(pace_S[:, None], full_SK).ravel()]


def _repair(bins: _Bins, left: list[int], of: _Items) -> bool:
    """Place the left-over items and swap until no bin is over the cap; whether that succeeded."""
    number, n = len(bins.items), len(of.tokens)
    for item in sorted(left, key=lambda i: (-of.tokens[i], i)):
        bins.put(item, min(range(number), key=bins.tokens.__getitem__), of)
    # Behind the items stands one of no tokens for each bin: a swap with it is a move.
    sizes = np.array(of.tokens + [0] * number)
    home = np.empty(n + number, np.int64)
    for b, held in enumerate(bins.items):
        home[held] = b
    home[n:] = np.arange(number)
    until = np.zeros(number, np.int64)
    for move in range(_REPAIRS):
        room = of.capacity - np.array(bins.tokens)
        worst = int(room.argmin())
        over = -int(room[worst])
        if over <= 0:
            return True
        open_to = np.where(until > move, -of.capacity, np.maximum(room, 0))
        open_to[worst] = -of.capacity
        held = bins.items[worst][-_LAST:]
        shift = sizes[held][:, None] - sizes
        # What the swap takes off this bin's overflow, less what it adds to the other's.
        gain = np.where(shift > 0, np.minimum(shift, over) - np.maximum(shift - open_to[home], 0), -of.capacity)
        best = int(gain.argmax())
        if gain.flat[best] <= -of.capacity:
            return False
        item, other = held[best // (n + number)], best % (n + number)
        to = int(home[other])
        _swap(bins, (worst, item), (to, other if other < n else None), of)
        home[item] = to
        if other < n:
            home[other] = worst
        until[worst] = move + 1 + _TENURE
    return min(of.capacity - used for used in bins.tokens) >= 0


def _swap(bins: _Bins, one: tuple[int, int], two: tuple[int, int | None], of: _Items) -> None:
    """Exchange (bin, item) for (bin, item); a move where the second names no item."""
    bins.take(one[1], one[0], of)
    if two[1] is not None:
        bins.take(two[1], two[0], of)
        bins.put(two[1], one[0], of)
    bins.put(one[1], two[0], of)


def _fill_empty(bins: _Bins, of: _Items) -> None:
    """Leave no rank without work while another has two items: from the costliest bin that can give, its cheapest item."""
    for b, held in enumerate(bins.items):
        if not held:
            givers = [g for g, items in enumerate(bins.items) if len(items) > 1]
            if not givers:
                return
            giver = max(givers, key=lambda g: (bins.costs[g], -g))
            _swap(bins, (giver, min(bins.items[giver], key=lambda i: (of.costs[i], i))), (b, None), of)


def _refine(bins: _Bins, step: list[int], of: _Items) -> None:
    """Swap between the costliest and the cheapest bins of a micro step while that lowers the costliest."""
    even = sum(bins.costs[b] for b in step) / len(step) * (1 + _EVEN)
    for _ in range(_REFINEMENTS * len(step)):
        step.sort(key=lambda b: (bins.costs[b], b))
        high = step[-1]
        if bins.costs[high] <= even:
            return
        for low in step[:-1]:
            found = _best_swap(bins, high, low, of)
            if found is not None:
                _swap(bins, (high, found[0]), (low, found[1]), of)
                break
        else:
            return


def _best_swap(bins: _Bins, high: int, low: int, of: _Items) -> tuple[int, int | None] | None:
    """The exchange after which the two bins are closest in cost, both under the cap; None where none brings them closer."""
    gap = bins.costs[high] - bins.costs[low]
    room_low = of.capacity - bins.tokens[low]
    room_high = of.capacity - bins.tokens[high]
    closest = gap * 0.999
    found: tuple[int, int | None] | None = None
    others = [(of.costs[i], of.tokens[i], i) for i in bins.items[low][-_LAST:]]
    for item in bins.items[high][-_LAST:]:
        cost, tokens = of.costs[item], of.tokens[item]
        if tokens <= room_low and len(bins.items[high]) > 1 and abs(gap - 2 * cost) < closest:
            closest, found = abs(gap - 2 * cost), (item, None)
        for other_cost, other_tokens, other in others:
            after = abs(gap - 2 * (cost - other_cost))
            if after < closest and -room_high <= tokens - other_tokens <= room_low:
                closest, found = after, (item, other)
    return found


def sync_efficiency(plan: list[list[list[int]]], costs_I: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """Share of the ranks' time that is work: mean cost of a rank over the sum of each micro step's costliest bin; 1 is perfect."""
    costs = [[sum(float(costs_I[i]) for i in held) for held in step] for step in plan]
    return sum(sum(step) / len(step) for step in costs) / sum(max(step) for step in costs)
