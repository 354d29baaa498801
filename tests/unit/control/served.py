"""A host with its interface, for the tests of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gpupoold
from gpupoold.api.peers import Claim
from gpupoold.api.server import ApiServer

from .test_pool import Host

#: of the package that is tested; the current directory may hold sources
PACKAGES = str(Path(gpupoold.__file__).parents[1])


class Served(Host):
    """A host with its interface."""

    def __init__(self, root: Path, **options: str) -> None:
        super().__init__(root, **options)
        self.claim = Claim(self.settings.api_socket)
        os.makedirs(self.settings.private_dir, 0o700)
        self.root_claim = Claim(self.settings.root_socket, 0o600)
        self.address = f"unix:{self.settings.api_socket}"
        self.start_api()

    def start_api(self) -> None:
        listeners = (self.root_claim.socket, self.claim.socket)
        self.api = ApiServer(self.settings, self.pool, listeners)
        self.api.start()

    def stop(self) -> None:
        self.api.stop()
        self.claim.close()
        self.root_claim.close()
        super().stop()

    def ctl(self, *arguments: str, **keywords) -> subprocess.CompletedProcess[str]:
        """gpupoolctl as a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "gpupoold.cmd.ctl", *arguments],
            env={**os.environ, "GPUPOOL_CONNECT": self.address, "PYTHONPATH": PACKAGES},
            capture_output=True,
            text=True,
            timeout=60,
            **{"cwd": "/", **keywords},
        )

    def json(self, *arguments: str):
        done = self.ctl("--json", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
