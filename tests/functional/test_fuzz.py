"""A bounded number of cases of tests/fuzz/protocol.py, always the same ones; others by hand."""

from __future__ import annotations

import pytest

from tests.functional.pool import Pool
from tests.functional.wire import Lease
from tests.fuzz import protocol


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (1, 60),
        pytest.param(2, 2000, marks=pytest.mark.slow),
    ],
)
def test_wrong_handshakes_frames_and_commands(pool: Pool, seed: int, count: int) -> None:
    with pool.started("main", ["sh", "-c", "cat $GPUPOOL_LEASE_FILE; exec cat"]) as holder:
        assert holder.stdout is not None
        protocol.run(pool, Lease.parse(holder.stdout.readline()), seed, count)
