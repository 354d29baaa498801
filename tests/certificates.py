"""Certificates for hosts of a pool, made by OpenSSL's own program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Files:
    """What a host is configured with."""

    certificate: Path
    key: Path
    authority: Path


class Authority:
    """One that signs certificates of hosts."""

    def __init__(self, root: Path, name: str = "authority") -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.certificate, self.key = root / f"{name}.crt", root / f"{name}.key"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", self.key, "-out", self.certificate, "-subj", f"/CN={name}", "-days", "2"),
        )

    def host(self, name: str, *, expired: bool = False, alternative: bool = True) -> Files:
        """A certificate for the host of that name."""
        stem = f"{name}{'-expired' if expired else ''}"
        key, request = self.root / f"{stem}.key", self.root / f"{stem}.csr"
        certificate, extension = self.root / f"{stem}.crt", self.root / f"{stem}.ext"
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", key, "-out", request, "-subj", f"/CN={name}"),
        )
        extension.write_text(f"subjectAltName=DNS:{name}\n" if alternative else "")
        validity = ("-days", "-1") if expired else ("-days", "2")
        self._openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.key),
            *("-CAcreateserial", "-out", certificate, "-extfile", extension, *validity),
        )
        return Files(certificate, key, self.certificate)

    @staticmethod
    def _openssl(*words: object) -> None:
        done = subprocess.run(
            ["openssl", *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
