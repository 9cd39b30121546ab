"""Which sequence is sampled in which slot, against a slow simulation of what the slots hold: every row runs once, a
copied prompt is there when it is copied, and no move overwrites what is still needed."""

from __future__ import annotations

import itertools
import random

import pytest

from megarlhf.experience.slots import Slots, Start


class Cache:
    """What each slot's keys and values are of: a prompt and the row that goes on behind it."""

    def __init__(self, slots: int):
        self.prompts: list[int | None] = [None] * slots
        self.rows: list[int | None] = [None] * slots


def simulate(lengths, *, samples, groups, size, compact, chunks=1, look_every=1, after_step=lambda slots: None):
    """Run rows of these many steps as the sampler does: step by step, chunk by chunk, group by group; in a group first
    the moves, then the prompts that are computed, then those that are copied, then a step of each row. Returns (for
    each row the slots in which it ran, the number of steps, the sum of the widths)."""
    rows = len(lengths)
    slots = Slots(rows=rows, samples=samples, groups=groups, size=size)
    caches = [Cache(groups * size) for _ in range(chunks)]
    ran: list[list[int]] = [[] for _ in lengths]
    started: list[int] = []
    step = widths = 0
    while True:
        changed: list[tuple[list[Start], list[tuple[int, int]]]] = [([], [])] * groups
        for chunk, group in itertools.product(range(chunks), range(groups)):
            if chunk == 0:
                held = list(slots.held[group])
                ended = [row is not None and len(ran[row]) >= lengths[row] for row in held]
                if step == 0 or (any(ended) and step % look_every == 0):
                    new = slots.refilled(group, ended, compact=compact)
                    assert slots.held[group] == held  # a plan alone changes nothing
                    changed[group] = slots.take(group, new)
                    check(changed[group], held, new, ended, group * size, samples)
                    started += [start.row for start in changed[group][0]]
                for place, row in enumerate(slots.held[group]):
                    if row is not None:
                        ran[row].append(group * size + place)
            fill(caches[chunk], *changed[group], group * size, samples)
            for place, row in enumerate(slots.held[group]):
                if row is not None:
                    assert caches[chunk].rows[group * size + place] == row
                    assert caches[chunk].prompts[group * size + place] == row // samples
        used = [[place for place, row in enumerate(held) if row is not None] for held in slots.held]
        assert [slots.count(group) for group in range(groups)] == list(map(len, used))
        assert [slots.used(group) for group in range(groups)] == [max(x, default=-1) + 1 for x in used]
        if not any(used):
            break
        widths += sum(slots.used(group) for group in range(groups))
        after_step(slots)
        step += 1
        assert step < 10_000
    assert started == list(range(rows))  # each once, in their order
    return ran, step, widths


def check(change, before, after, ended, first, samples) -> None:
    """A change of a group's rows."""
    starts, moves = change
    for source, target in moves:
        assert source != target and not ended[source]
        assert before[source] == after[target] is not None
    for start in starts:
        assert after[start.slot - first] == start.row
        assert (start.source is None) == (start.row % samples == 0)
    stayed = {row for row, over in zip(before, ended, strict=True) if row is not None and not over}
    held = [row for row in after if row is not None]
    assert stayed | {start.row for start in starts} == set(held) and len(set(held)) == len(held)  # no row is lost


def fill(cache: Cache, starts: list[Start], moves: list[tuple[int, int]], first: int, samples: int) -> None:
    """A change of a group's rows in one chunk's cache."""
    expected = [(cache.prompts[first + source], cache.rows[first + source]) for source, _ in moves]
    for source, target in moves:
        cache.prompts[first + target] = cache.prompts[first + source]
        cache.rows[first + target] = cache.rows[first + source]
    assert expected == [(cache.prompts[first + target], cache.rows[first + target]) for _, target in moves]
    for start in starts:
        if start.source is None:
            cache.prompts[start.slot], cache.rows[start.slot] = start.row // samples, start.row
    for start in starts:
        if start.source is not None:
            assert cache.prompts[start.source] == start.row // samples, "the prompt is gone"
            cache.prompts[start.slot], cache.rows[start.slot] = start.row // samples, start.row


def of_groups(ran, size):
    return [{slot // size for slot in slots} for slots in ran]


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_every_row_runs_once(groups, samples, compact):
    draw = random.Random(1000 * groups + 10 * samples + compact)
    for _ in range(60):
        size, look_every = draw.choice([1, 2, 3, 4, 7, 16]), draw.choice([1, 1, 4])
        rows = samples * draw.randint(1, 14)
        lengths = [draw.randint(1, draw.choice([1, 3, 20])) for _ in range(rows)]
        ran, steps, _ = simulate(
            lengths, samples=samples, groups=groups, size=size, compact=compact, look_every=look_every,
            chunks=draw.choice([1, 1, 2, 3]),
        )  # fmt: skip
        for length, slots in zip(lengths, ran, strict=True):
            assert len(slots) >= length
            assert len(slots) == length or look_every > 1
            assert len(slots) < length + look_every
        assert all(len(found) == 1 for found in of_groups(ran, size))  # a row stays in its group
        if not compact:
            assert all(len(set(slots)) == 1 for slots in ran)  # ... and in its slot
        # As list scheduling on this many machines (Graham 1966): at most the mean load and one row more.
        if look_every == 1:
            assert steps <= sum(lengths) / (groups * size) + max(lengths)


def test_a_slot_is_refilled_at_once():
    """Two slots, rows of 1, 5, 1, 1, 1, 1: the short ones one after the other beside the long one."""
    ran, steps, _ = simulate([1, 5, 1, 1, 1, 1], samples=1, groups=1, size=2, compact=True)
    assert steps == 5
    assert ran == [[0], [1] * 5, [0], [0], [0], [0]]


def test_samples_of_a_prompt_fill_the_groups_in_turn():
    ran, steps, _ = simulate([3] * 8, samples=4, groups=2, size=4, compact=False)
    assert steps == 3
    assert [slots[0] for slots in ran] == list(range(8))


def test_empty_slots_come_last_once_no_row_waits():
    seen = []
    ran, _, widths = simulate(
        [9, 1, 1, 9, 1, 1, 4], samples=1, groups=1, size=7, compact=True,
        after_step=lambda slots: seen.append(list(slots.held[0])),
    )  # fmt: skip
    assert seen[1] == [0, 3, 6, None, None, None, None]
    assert ran[3] == [3] + [1] * 8 and ran[6] == [6, 2, 2, 2]
    assert widths == 7 + 3 * 3 + 5 * 2
    _, _, wide = simulate([9, 1, 1, 9, 1, 1, 4], samples=1, groups=1, size=7, compact=False)
    assert wide == 7 + 3 * 7 + 5 * 4


def test_no_row_moves_while_others_wait():
    """A row that starts later looks for its prompt where its sibling started."""
    draw = random.Random(5)
    for _ in range(50):
        seen: list[tuple[int, list]] = []
        lengths = [draw.randint(1, 9) for _ in range(24)]
        simulate(lengths, samples=4, groups=1, size=3, compact=True,
                 after_step=lambda slots, seen=seen: seen.append((slots.queue, list(slots.held[0]))))  # fmt: skip
        places: dict[int, set[int]] = {}
        for queue, held in seen:
            for place, row in enumerate(held):
                if row is not None and queue < 24:
                    places.setdefault(row, set()).add(place)
        assert all(len(found) == 1 for found in places.values())


def test_rows_out_of_turn_and_moves_to_the_right_are_refused():
    slots = Slots(rows=4, samples=1, groups=1, size=3)
    with pytest.raises(AssertionError):
        slots.take(0, [1, None, None])
    slots = Slots(rows=4, samples=1, groups=1, size=3)
    slots.take(0, [0, 1, None])
    with pytest.raises(AssertionError):
        slots.take(0, [1, None, 0])
