"""The pictures say what the simulator and the results say."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from numba_tma.pictures import (
    attention_blocks,
    attention_registers,
    attention_turns,
    fill,
    pictures,
    ragged,
    results,
    ring,
    swizzle,
)
from numba_tma.pictures.svg import Picture
from numba_tma.sim.descriptor import Swizzle

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pictures(RESULTS)


def test_what_is_checked_in_is_what_is_made(made):
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").iterdir()}
    assert kept.keys() == made.keys(), "run scripts/make_pictures.py"
    stale = [name for name, text in made.items() if kept[name] != text]
    assert not stale, f"run scripts/make_pictures.py: {', '.join(stale)}"


def test_every_picture_is_sound(made):
    """It parses, names itself, has a colour for every class in both surroundings, and nothing off the card."""
    for name, text in made.items():
        root = ElementTree.fromstring(text)
        width, height = float(root.get("width")), float(root.get("height"))
        assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text, name
        style = root.find(f"{SVG}style").text
        dark = style.split("@media (prefers-color-scheme:dark)")[1]
        for element in root.iter():
            for word in (element.get("class") or "").split():
                assert f".{word}{{" in style, f"{name}: {word} has no style"
            assert element.get("fill") is None and element.get("style") is None, f"{name}: a colour without a class"
            if element.tag in (f"{SVG}rect", f"{SVG}text"):
                assert 0 <= float(element.get("x")) <= width and 0 <= float(element.get("y")) <= height, (name, text)
        assert ".ink{" in dark and ".card{" in dark


# Counted by hand. Rows of 128 bytes all begin in bank 0; of 64 bytes, in banks 0 and 16; of 32, in four banks.
@pytest.mark.parametrize(
    ("row_bytes", "kind", "expected"),
    [
        (128, Swizzle.NONE, (8, 32)),
        (64, Swizzle.NONE, (4, 16)),
        (32, Swizzle.NONE, (2, 8)),
        (128, Swizzle.B128, (1, 4)),
        (64, Swizzle.B64, (1, 4)),
        (32, Swizzle.B32, (1, 4)),
    ],
)
def test_bank_conflicts(row_bytes, kind, expected):
    assert swizzle.costs(row_bytes, kind) == expected


def test_passes():
    assert swizzle.passes(np.arange(32) * 4, 4) == 1
    assert swizzle.passes(np.zeros(32, int), 4) == 1  # one word for all is no conflict
    assert swizzle.passes(np.array([0, 128, 256]), 4) == 3
    assert swizzle.passes(np.array([0, 16, 128]), 16) == 2


def test_every_cell_of_a_tile_has_a_place_of_its_own():
    for row_bytes, kind in [(128, Swizzle.B128), (64, Swizzle.B64), (32, Swizzle.B32)]:
        places = swizzle.places(row_bytes, kind)
        assert sorted(places.ravel()) == list(range(0, 32 * row_bytes, 16))
        assert all(
            0 <= place - place % 128 - (row * row_bytes) // 128 * 128 < 128
            for row in range(32)
            for place in places[row]
        )


@pytest.mark.parametrize("kind", ["zero", "nan"])
def test_boxes_over_the_edge(rng, kind):
    array = rng.random((5, 12), np.float32)
    outside = 0.0 if kind == "zero" else np.nan
    for row, column in [(0, 0), (-3, -4), (2, 8), (-1, 4), (9, 0), (0, -8)]:
        padded = np.full((40, 60), outside, np.float32)
        padded[20:25, 20:32] = array
        expected = padded[20 + row : 20 + row + fill.ROWS, 20 + column : 20 + column + fill.COLUMNS]
        np.testing.assert_array_equal(fill.landed(array, column, row, kind), expected)


def test_turns_of_a_ring():
    """Each tile lands before it is read and is given back before its buffer is asked to take another."""
    turns, events = ring.turns()
    assert [turn.step for turn in turns] == list(range(ring.STEPS))
    assert [turn.stage for turn in turns] == [step % ring.STAGES for step in range(ring.STEPS)]
    numbers = [number for turn in turns for number in (turn.asked, turn.landed, turn.read, turn.released)]
    assert sorted(numbers) == list(range(events))
    for turn in turns:
        assert turn.asked < turn.landed < turn.read < turn.released
    for turn, following in zip(turns, turns[ring.STAGES :], strict=False):
        assert turn.released < following.asked
    under_way = [sum(turn.asked <= event < turn.landed for turn in turns) for event in range(events)]
    assert max(under_way) == ring.STAGES


def test_bars_are_as_long_as_the_rates(made):
    records = [r for r in json.loads((RESULTS / "h200_run_all.json").read_text()) if r["problem"] == "copy"]
    root = ElementTree.fromstring(results.bars(records))
    bars = [e for e in root.iter(f"{SVG}rect") if e.get("x") == "288"]
    rates = [record["gb_per_s"] for record in records]
    assert len(bars) == len(rates)
    lengths = np.array([float(bar.get("width")) for bar in bars])
    np.testing.assert_allclose(lengths / lengths.max(), np.array(rates) / max(rates), atol=2e-4)
    assert [bar.get("class") for bar in bars[:3]] == ["threads", "threads", "cp_async"]


def test_peers_are_drawn_where_there_are_any():
    records = [r for r in json.loads((RESULTS / "h200_run_all.json").read_text()) if r["problem"] == "copy"][:5]
    assert "peer" not in results.bars(records)
    compared = copy.deepcopy(records)
    compared[-1].update(peer="somebody's copy", ratio_to_peer=0.5)
    root = ElementTree.fromstring(results.bars(compared))
    marks = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "peer" and e.get("width") == "3"]
    bars = [e for e in root.iter(f"{SVG}rect") if e.get("x") == "288"]
    assert len(marks) == 1
    # Half as fast as the peer: its mark stands at twice the bar's length.
    assert float(marks[0].get("x")) + 1.5 - 288 == pytest.approx(2 * float(bars[-1].get("width")), abs=0.3)
    assert "somebody's copy" in results.bars(compared)


def test_text_is_escaped():
    picture = Picture(10, 10, 'a "title" & more', "x < y")
    picture.text(1, 2, "a < b & c")
    root = ElementTree.fromstring(picture.svg())
    assert [e.text for e in root.iter(f"{SVG}text")] == ["a < b & c"]
    assert root.get("aria-label") == 'a "title" & more'
    assert re.search(r"^</svg>\n$", picture.svg(), re.M)


def test_products_are_as_long_as_their_rates(made):
    records = json.loads((RESULTS / "h200_gemm.json").read_text())["shapes"]
    records = [r for r in records if (r["dtype"], r["b_major"]) == ("bfloat16", "k")]
    root = ElementTree.fromstring(made["matmul.svg"])
    bars = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "tma"][1:]  # the first is the legend's
    marks = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "peer"][1:]
    assert len(bars) == len(marks) == len(records)
    for bar, mark, record in zip(bars, marks, records, strict=True):
        reached, peer = float(bar.get("width")), float(mark.get("x")) + 1.5 - float(bar.get("x"))
        assert reached / peer == pytest.approx(record["cublas_seconds"] / record["seconds"], rel=0.01)


# Attention.


def test_limits_of_blocks():
    """Against the whole mask: a block is fetched if a query sees some of it, masked if some query does not see all."""
    for sq, skv in [(attention_blocks.SQ, attention_blocks.SKV), (100, 300), (300, 300)]:
        rows, keys = attention_blocks.ROWS, attention_blocks.KEYS
        blocks = -(-skv // keys)
        seen = np.zeros((-(-sq // rows) * rows, blocks * keys), bool)
        seen[:sq, :skv] = attention_blocks.BAND.visible(sq, skv)
        for tile, numbers in enumerate(attention_blocks.limits(sq, skv).tolist()):
            own = seen[tile * rows : min((tile + 1) * rows, sq)].reshape(-1, blocks, keys)
            walked = attention_blocks.walk(*numbers)
            fetched = np.flatnonzero(own.any((0, 2)))
            assert [block for block, _ in walked] == fetched[::-1].tolist()
            for block, masked in walked:
                assert masked or own[:, block].all()


def test_a_walk_begins_masked_and_goes_backwards():
    assert attention_blocks.walk(0, 0, 2, 4) == [(3, True), (2, True), (1, False), (0, False)]
    assert attention_blocks.walk(1, 2, 3, 3) == [(2, True), (1, True)]


def test_budgets_are_kept():
    """O of 64 rows and D columns is D / 2 registers of each of 128 threads; the counts of all threads fit an SM."""
    for head_dim in attention_registers.HEAD_DIMS:
        found = attention_registers.budget(head_dim)
        assert found.registers["O"] == 64 * head_dim / 128
        assert found.registers["S"] == 2 * found.registers["P"] == 64 * found.configuration.keys / 128
        assert sum(found.registers.values()) == found.total and min(found.registers.values()) > 0
        assert found.configuration.consumers * 128 * found.total <= 65536
        assert sum(found.shared.values()) <= attention_registers.SHARED_KB * 1024
        assert found.shared["Q"] == found.configuration.rows * head_dim * 2


def test_copies_end_where_sequences_end(rng):
    lengths = tuple(rng.integers(1, 8, 3).tolist())
    rows = sum(lengths)
    array = np.repeat(rng.permutation(rows)[:, None] + 1, ragged.COLUMNS, axis=1).astype(np.float32)
    found = list(ragged.copies(array, lengths))
    assert len(found) == sum(-(-length // ragged.ROWS) for length in lengths)
    for copy_ in found:
        inside = min(ragged.ROWS, copy_.length - copy_.row)
        first = copy_.start + copy_.row
        expected = [*array[first : first + inside, 0], *[0.0] * (ragged.ROWS - inside)]
        assert list(copy_.landed) == expected
        assert copy_.x + copy_.y - 2**30 == first and copy_.z == 2**30


@pytest.mark.parametrize("step", attention_turns.STEPS)
def test_turns_of_warpgroups(step):
    """What is kept holds together: scores, their softmax, the product; in step 8 one warpgroup's follow the other's."""
    spans = attention_turns.kept(RESULTS)[step]
    products = {(s.what, s.who, s.number): s for s in spans if s.what in ("scores", "weighted")}
    assert len(products) == 4 * attention_turns.BLOCKS
    copies = {(s.what, s.number): s for s in spans if s.what in "kv"}
    assert len(copies) == 2 * attention_turns.BLOCKS
    for who in "AB":
        for number in range(attention_turns.BLOCKS):
            scores, weighted = products["scores", who, number], products["weighted", who, number]
            assert copies["k", number].end <= scores.start and copies["v", number].end <= weighted.start
            assert scores.end < weighted.start
            assert any(
                s.what == "softmax" and s.who == who and s.start >= scores.start and s.start < weighted.start
                for s in spans
            )
    order = [s.who for s in sorted(products.values(), key=lambda s: s.start)]
    taking_turns = "AABB" * (attention_turns.BLOCKS - 1)
    assert ("".join(order)[2:-2] == taking_turns) == (step == "ping_pong")


def test_the_model_still_says_what_is_kept():
    """Order and kinds are the same; times may differ a little with the compiler's version."""
    kept, now = attention_turns.kept(RESULTS)["ping_pong"], attention_turns.modelled("ping_pong")
    assert attention_turns.busy(now) == pytest.approx(attention_turns.busy(kept), abs=0.05)
    for what in ("scores", "weighted", "k", "v"):
        ends = [[s.end for s in spans if s.what == what and s.who in ("", "A")] for spans in (kept, now)]
        np.testing.assert_allclose(ends[1], ends[0], rtol=0.1, err_msg="run scripts/make_pictures.py --model")
