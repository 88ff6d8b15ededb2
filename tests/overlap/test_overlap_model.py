"""The modelled engines: times that can be worked out by hand, and mistakes that show."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma.overlap import MODES, Alone, Mode, Model, Pipeline, ideal, loops, pitfalls, serial, table
from numba_tma.overlap.model import ModelEngines, ModelStream
from numba_tma.overlap.rates import stages_alone

MS = 1e-3
WORDS = 50
RATE = 4 * WORDS / MS  # a batch takes a millisecond
SPEC = {"words": ((WORDS,), np.uint32)}


def machine(**options):
    return Model(
        **{"h2d": RATE, "d2h": RATE, "alone": RATE, "pageable": RATE, "latency": 0.0, "compute": MS, **options}
    )


def seconds(mode, batches, depth=None, **options):
    def compute(inputs, outputs, stream):
        outputs["words"][...] = inputs["words"]

    with Pipeline(compute, SPEC, SPEC, mode=mode, depth=depth, record=True, model=machine(**options)) as p:
        for result in p.run(np.full(WORDS, number, np.uint32) for number in range(batches)):
            assert (result["words"] == result.index).all()
        return p.report.seconds, p.report


@pytest.mark.parametrize("batches", [1, 2, 4, 9])
def test_equal_stages(batches):
    assert seconds("serial_pinned", batches)[0] == pytest.approx(3 * batches * MS)
    for mode in ("three_streams", "producer"):
        assert seconds(mode, batches)[0] == pytest.approx((batches + 2) * MS)
    # Two at once: a pair of batches takes four stages, the next pair begins as its streams come free.
    if batches % 2 == 0:
        assert seconds("two_streams", batches)[0] == pytest.approx((3 * batches / 2 + 1) * MS)


@pytest.mark.parametrize("compute", [0.25, 3.0])
def test_the_longest_stage_sets_the_pace(compute):
    took, report = seconds("three_streams", 10, compute=compute * MS)
    assert took == pytest.approx(ideal(Alone(MS, compute * MS, MS), 10))
    assert took == pytest.approx((2 + compute + 9 * max(1, compute)) * MS)
    assert report.utilisation()["compute"] == pytest.approx(10 * compute * MS / took)


def test_pageable_copies_hold_the_host_and_are_slower():
    three = Mode("three", pinned=False, streams=3, layout="engines")
    took, report = seconds(three, 4, pageable=RATE / 2)
    # Each batch: 2 ms in, 1 ms kernel, 2 ms out, and the next cannot be submitted before.
    assert took == pytest.approx(4 * 5 * MS)
    assert report.busy()["H2D"] == pytest.approx(8 * MS)


def test_rates_alone_hold_where_nothing_overlaps():
    assert seconds("serial_pinned", 2, alone=2 * RATE)[0] == pytest.approx(4 * MS)
    assert seconds("three_streams", 2, alone=2 * RATE)[0] == pytest.approx(4 * MS)


def test_depth_bounds_what_is_under_way():
    assert seconds("three_streams", 8, depth=1)[0] == pytest.approx(24 * MS)
    assert seconds("three_streams", 8, depth=2)[0] == pytest.approx((3 * 8 / 2 + 1) * MS)
    assert seconds("three_streams", 8, depth=3)[0] == pytest.approx(10 * MS)


def test_a_producer_prepares_beside_the_engines():
    assert seconds("producer", 8, prepare=MS)[0] == pytest.approx(11 * MS)
    # The caller's thread prepares as well, while it waits for nothing: as long as there are slots.
    assert seconds("three_streams", 8, prepare=MS)[0] >= 11 * MS
    assert seconds("serial_pinned", 8, prepare=MS)[0] == pytest.approx(32 * MS)


def test_bytes_may_stand_for_more():
    assert seconds("serial_pinned", 1, scale=3.0)[0] == pytest.approx(7 * MS)
    assert "a byte for 3" in machine(scale=3.0).words()


def test_compute_may_depend_on_the_batch():
    took, _ = seconds("three_streams", 3, compute=lambda inputs: 2 * MS)
    assert took == pytest.approx((2 + 3 * 2) * MS)


def test_ideal_by_hand():
    assert ideal(Alone(2.0, 5.0, 1.0), 4) == 2 + 4 * 5 + 1
    assert ideal(Alone(6.0, 5.0, 1.0), 4) == 4 * 6 + 5 + 1
    assert ideal(Alone(1.0, 1.0, 1.0, prepare=3.0), 2) == 2 * 3 + 3
    assert ideal(Alone(1.0, 1.0, 1.0), 0) == 0
    ends = Alone(2.0, 5.0, 3.0, first_h2d=1.5, last_d2h=2.5)
    assert ideal(ends, 4) == 1.5 + 4 * 5 + 2.5
    assert ideal(Alone(6.0, 5.0, 3.0, first_h2d=1.5, last_d2h=2.5), 4) == 4 * 6 + 5 + 2.5
    assert serial(Alone(2.0, 5.0, 1.0), 4) == 32


def test_alone_and_the_table():
    reports = {}
    for mode in MODES:
        with Pipeline(lambda i, o, s: None, SPEC, SPEC, mode=mode, record=True, model=machine()) as p:
            alone = stages_alone(p, np.zeros(WORDS, np.uint32))
            list(p.run([np.zeros(WORDS, np.uint32)] * 4))
            reports[mode] = p.report
    assert (alone.h2d, alone.compute, alone.d2h) == pytest.approx((MS, MS, MS))
    rows = {line.split()[0]: line.split() for line in table(reports, alone).splitlines()[2:]}
    assert rows["three_streams"][2:4] == ["6.000", "2.00×"] and rows["three_streams"][-1] == "100.0%"
    assert rows["serial_pinned"][2] == "12.000" and rows["serial_pinned"][-1] == "50.0%"
    first = table(reports).splitlines()[2:][0].split()
    assert first[0] == "serial_pageable" and first[3] == "1.00×"
    beside_pinned = {line.split()[0]: line.split() for line in table(reports, baseline="serial_pinned").splitlines()}
    assert beside_pinned["three_streams"][3] == "2.00×" and beside_pinned["serial_pageable"][3] == "1.00×"
    assert "vs serial_pinned" in table(reports, baseline="serial_pinned")
    with pytest.raises(ValueError, match="baseline 'none': choose one of the runs, serial_pageable"):
        table(reports, baseline="none")
    text = reports["three_streams"].text(alone)
    assert "800 bytes in, 800 bytes out" in text
    assert "times are the model's, not measured" in text and "reached 100.0% of it" in text


def test_copies_read_when_they_begin_and_write_when_they_end():
    engines = ModelEngines(machine())
    stream, other = engines.stream(), engines.stream()
    host, back, device = np.arange(WORDS, dtype=np.uint32), np.zeros(WORDS, np.uint32), np.zeros(WORDS, np.uint32)
    engines.copy_in(device, host, stream)
    engines.copy_out(back, device, other)  # begins at the same time: nothing has arrived
    assert not device.any()
    engines.drain([stream, other])
    np.testing.assert_array_equal(device, host)
    assert not back.any()
    event = engines.event()
    engines.copy_in(device, host + 7, stream)
    engines.record(event, stream)
    engines.wait(other, event)
    engines.copy_out(back, device, other)
    engines.synchronize(event)
    assert not back.any()
    engines.drain([other])
    np.testing.assert_array_equal(back, host + 7)


@pytest.fixture
def setting(seed):
    return pitfalls.Setting(WORDS, 4, batches=6, model=machine(), seed=seed)


def test_bytes_of_a_batch_are_those_that_a_models_stand_for():
    assert pitfalls.Setting(WORDS, 4, model=machine(scale=2.5)).nbytes == 10 * WORDS
    assert pitfalls.Setting(WORDS, 4).nbytes == 4 * WORDS


def test_the_loop_as_written_is_wrong_and_mended_right(setting):
    found = pitfalls.loop(setting)
    assert {0, 5} <= set(found["as_written_wrong"])  # never copied in; never returned
    assert found["as_written_wrong"] == list(range(6))  # nor does any kernel wait for its input
    assert found["mended_wrong"] == []


def test_a_loop_that_frees_a_buffer_too_early_is_wrong(setting):
    """Without the wait for the kernel two batches ago, a copy in overtakes it."""

    class Hasty(ModelEngines):
        def wait(self, stream, event):
            if stream is not hasty.copy_in:
                super().wait(stream, event)

    data = setting.inputs()
    engines = Hasty(machine(compute=5 * MS))
    hasty = loops.Buffers(engines, data)

    def compute(inputs, outputs, stream):
        outputs["words"][...] = inputs["words"] + 1

    loops.mended(hasty, compute)
    assert loops.wrong(hasty.results, [words + 1 for words in data])


def test_pitfalls_on_the_model(setting):
    found = pitfalls.default_stream(setting)
    assert found["default_stream_seconds"] == pytest.approx(18 * MS)
    assert found["own_streams_seconds"] == pytest.approx(8 * MS)
    found = pitfalls.no_wait(setting)
    assert (found["wrong_at_once"], found["wrong_when_awaited"]) == (WORDS, 0)
    found = pitfalls.pageable(setting)
    assert found["bytes_each_way"] == 4 * WORDS
    assert found["pageable_seconds"] == pytest.approx(18 * MS) and found["pinned_seconds"] == pytest.approx(8 * MS)
    found = pitfalls.many_streams(setting, (1, 3, 8))["seconds_by_streams"]
    assert found["8"] == pytest.approx(found["3"]) == pytest.approx(found["a stream an engine"])


@pytest.mark.parametrize("options", [{"h2d": 0}, {"alone": -1}, {"latency": -1e-6}, {"compute": -1}, {"scale": 0}])
def test_impossible_models(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Model(**options)


@pytest.mark.parametrize("dropped", ["input", "result"])
def test_without_its_events_the_pipeline_is_wrong(dropped, monkeypatch):
    """So the numbers of the other tests would show a wait that is missing."""
    kept = ModelEngines.wait
    streams = [ModelStream() for _ in range(3)]
    deaf = streams[1 if dropped == "input" else 2]

    def wait(engines, stream, event):
        if stream is not deaf:
            kept(engines, stream, event)

    monkeypatch.setattr(ModelEngines, "wait", wait)

    def compute(inputs, outputs, stream):
        outputs["words"][...] = inputs["words"] + 1

    data = [np.full(WORDS, 5 + number, np.uint32) for number in range(6)]
    with Pipeline(compute, SPEC, SPEC, model=machine(), streams=streams) as p:
        assert any((result["words"] != data[result.index] + 1).any() for result in p.run(data))


def test_random_machines(rng):
    """Right numbers, in order, and never faster than the longest engine allows, whatever the times."""
    for _ in range(25):
        h2d, d2h, compute, prepare = rng.uniform(0.1, 3, 4) * MS
        mode = str(rng.choice(list(MODES)))
        count, depth = int(rng.integers(1, 12)), int(rng.integers(1, 8))
        model = machine(h2d=4 * WORDS / h2d, d2h=4 * WORDS / d2h, compute=compute, prepare=prepare, alone=1e12)
        data = [rng.integers(0, 2**32, WORDS, np.uint32) for _ in range(count)]

        def invert(inputs, outputs, stream):
            outputs["words"][...] = ~inputs["words"]

        with Pipeline(invert, SPEC, SPEC, mode=mode, depth=depth, record=True, model=model) as p:
            for number, result in enumerate(p.run(iter(data))):
                assert result.index == number
                np.testing.assert_array_equal(result["words"], ~data[number])
            assert p.free_slots == depth
            busy, took = p.report.busy(), p.report.seconds
        assert took >= max(busy.values()) - 1e-12
        if mode == "producer" and depth >= 6:
            assert took == pytest.approx(ideal(Alone(h2d, compute, d2h, prepare), count))
        if mode.startswith("serial"):
            assert took == pytest.approx(sum(busy.values()))
