"""This host's certificate, for gRPC. The files are read when they are needed, so that new ones
count from the next connection on."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from gpupoold.conf import Settings
from gpupoold.errors import ConfigurationError

LOG = logging.getLogger(__name__)


def read(settings: Settings) -> tuple[bytes, bytes, bytes]:
    """Authorities, key and certificate as PEM; raises ConfigurationError."""
    texts = []
    for option in ("ca_file", "key_file", "certificate_file"):
        path = getattr(settings, option)
        try:
            texts.append(Path(path).read_bytes())
        except OSError as error:
            raise ConfigurationError(f"[relay] {option}: {path}: {error.strerror}") from None
    _check(settings)
    return texts[0], texts[1], texts[2]


def _check(settings: Settings) -> None:
    """gRPC takes anything, and serves nobody then."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(settings.ca_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"[relay] ca_file: {settings.ca_file}: {error}") from None
    try:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(
            f"[relay] certificate_file, key_file: {settings.certificate_file} and "
            f"{settings.key_file}: {error}"
        ) from None


def of_client(settings: Settings) -> grpc.ChannelCredentials:
    """For a connection to another host; raises ConfigurationError."""
    authorities, key, certificate = read(settings)
    return grpc.ssl_channel_credentials(authorities, key, certificate)


def of_server(settings: Settings) -> grpc.ServerCredentials:
    """For other hosts, which need a certificate too. Raises ConfigurationError if the files cannot
    be read now; later, what was read last stays."""
    last = read(settings)

    def configuration(texts: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
        authorities, key, certificate = texts
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], root_certificates=authorities
        )

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        try:
            texts = read(settings)
        except ConfigurationError as error:
            LOG.error("the certificate stays as it was: %s", error)
            return None
        if texts == last:
            return None
        last = texts
        LOG.info("the certificate is read anew")
        return configuration(texts)

    return grpc.dynamic_ssl_server_credentials(
        configuration(last), fetch, require_client_authentication=True
    )
