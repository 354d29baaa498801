"""Tests of the sources beside this directory, whether or not the distribution is installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
