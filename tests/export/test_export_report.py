import json
import time
from pathlib import Path

import pytest

from t2n_hf.export.report import ExportReport, Stopwatch, format_bytes, peak_rss_bytes


def report(**options):
    facts = {
        "folder": Path("out"),
        "archive": Path("out/model.nnef.tgz"),
        "archives": {"model": Path("out/model.nnef.tgz")},
        "dtype": "f32",
        "check": "passed",
        "max_abs_error": 0.00012,
        "max_rel_error": 3e-6,
        "tolerance": 1e-4,
        "seconds": {"load": 1.0, "write": 0.5, "total": 2.0},
        "peak_rss_bytes": 420_000_000,
        "weight_bytes": 538_090_000,
        "formats": {"f32": (61, 8_000_000), "q4_0": (211, 76_000_000)},
    }
    return ExportReport(**{**facts, **options})


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (76_300_000, "76.3 MB"), (5_300_000_000_000, "5300.0 GB")],
    ids=str,
)
def test_bytes_read_well(nbytes, text):
    assert format_bytes(nbytes) == text


def test_phases_add_up_and_end_even_when_they_raise():
    watch = Stopwatch()
    with watch.phase("write"):
        time.sleep(0.002)
    with pytest.raises(RuntimeError), watch.phase("write"):
        raise RuntimeError
    seconds = watch.seconds()
    assert list(seconds) == ["write", "total"]
    assert 0.002 <= seconds["write"] <= seconds["total"]


def test_the_peak_covers_memory_that_was_let_go():
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
    size = len(block)
    del block
    assert peak_rss_bytes() > size


def test_a_report_tells_archive_weights_check_time_and_memory():
    text = str(report())
    for part in (
        "model.nnef.tgz",
        "538.1 MB",
        "211 q4_0 (76.0 MB)",
        "largest error 0.00012, relative 3e-06 (tolerance 0.0001)",
        "2.0 s: load 1.0, write 0.5",
        "420.0 MB at its peak",
    ):
        assert part in text


def test_a_skipped_check_says_why():
    text = str(report(check="skipped: short of memory", max_abs_error=None, max_rel_error=None, tolerance=None))
    assert "skipped: short of memory" in text


def test_what_stayed_dense_is_grouped_by_reason_and_long_lists_are_cut():
    names = {f"layers.{i}.up.weight": "48 columns" for i in range(20)}
    text = str(report(dense={**names, "head.weight": "asked"}))
    assert "48 columns: layers.0.up.weight" in text
    assert "and 8 more" in text
    assert "asked: head.weight" in text


def test_a_report_is_json():
    assert json.loads(json.dumps(report().to_dict()))["archive"] == "out/model.nnef.tgz"
