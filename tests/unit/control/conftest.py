"""Fixtures of the control plane's unit tests."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# These processes fork without exec'ing at once (to be another user); gRPC's own handlers would run
# in between.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Behind the installed packages, for what all kinds of tests share.
sys.path.append(str(Path(__file__).resolve().parents[3]))


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory with a path short enough for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="gp-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def host(root):
    from .test_pool import Host

    made = Host(root)
    yield made
    made.stop()
    if made.broker is not None:
        made.broker.close()


@pytest.fixture
def served(root):
    from .served import Served

    made = Served(root)
    yield made
    made.stop()
    made.broker.close()


@pytest.fixture(scope="module")
def shared():
    """A host with the slice "a", for tests that change nothing."""
    root = Path(tempfile.mkdtemp(prefix="gp-", dir="/tmp"))
    from .served import Served

    made = Served(root)
    made.json("slice", "create", "--name", "a", "--compute", "25", "--memory", "4096")
    yield made
    made.stop()
    made.broker.close()
    shutil.rmtree(root)
