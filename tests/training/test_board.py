"""Event files, as TensorBoard itself reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.training.board import Board, _checksum


def test_tensorboard_reads_the_curves_and_forgets_what_a_restart_undoes(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = Board(tmp_path, 0)
    for step in range(1, 400):
        board.add(step, {"loss": 1 / step, "lr": 0.1})
    board.close()
    again = Board(tmp_path, 300)
    again.add(301, {"loss": 7.0})
    again.close()
    found = accumulators.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    found.Reload()
    loss = found.Scalars("loss")
    kept = [point.step for point in loss]
    assert loss[1].value == pytest.approx(0.5) and loss[-1].value == 7.0
    assert kept[-1] == 301 and len(kept) == len(set(kept))


def test_checksums_are_the_masked_ones_of_crc32c() -> None:
    # CRC-32C of "123456789" is e3069283; masked it is turned by 15 bits, and a constant is added.
    crc = 0xE3069283
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert int.from_bytes(_checksum(b"123456789"), "little") == masked
