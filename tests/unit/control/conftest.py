"""Fixtures of the control plane's unit tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# These processes fork without exec'ing at once (to be another user); gRPC's own handlers would run
# in between.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory with a path short enough for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="gp-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
