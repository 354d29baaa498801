"""Reads the configuration and checks every value before anything is started."""

from __future__ import annotations

import contextlib
import io
import ipaddress
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from oslo_config import cfg
from oslo_log import log

import gpupoold
from gpupoold.conf import opts
from gpupoold.errors import ConfigurationError
from gpupoold.paths import ROOT_SOCKET

#: the longest path that a unix socket may have (sizeof(sun_path) - 1)
SOCKET_PATH_MAX = 107
#: the longest name of a socket below run_dir
LONGEST_SOCKET = "private/api.sock"


@dataclass(frozen=True)
class PeerSettings:
    """Another host of the pool, and what it may have of this one at once."""

    name: str  # as in its certificate
    address: str  # ADDRESS:PORT of its gpupoold
    slices: int
    compute_percent: int  # 0: no limit of its own
    memory_mib: int  # 0: no limit of its own


@dataclass(frozen=True)
class Settings:
    """The configuration of one gpupoold; paths are absolute. See the sample file for each value."""

    host: str
    state_dir: str
    run_dir: str
    event_limit: int
    driver_directory: str  # empty: the system's driver
    memory_reserve_mib: int
    placement_policy: str
    health_interval: int
    max_connections: int
    max_connections_per_user: int
    worker_threads: int
    max_slices_per_user: int
    max_runs_per_user: int
    broker_tcp_listen: str
    warm_workers: int
    warm_context: bool
    worker_user: str
    max_sessions_per_lease: int
    max_half_open: int
    worker_log_bytes: int
    kill_grace_ms: int
    worker_host_memory: int
    rings: bool
    regions: bool
    spinners: int
    vsock_port: int
    cgroup_parent: str
    disable_seccomp: bool
    worker_environment: dict[str, str]
    libvirt_uri: str  # empty: no virtual machines
    libvirt_attach_devices: bool
    libvirt_region_mib: int
    libvirt_region_group: str
    libvirt_interval: int
    libvirt_qemu_pid_dir: str
    cdi_dir: str  # empty: no containers
    container_library_dirs: tuple[str, ...]
    certificate_file: str  # empty: nothing to do with other hosts
    key_file: str
    ca_file: str
    peer_listen: str  # empty: other hosts do not reach this gpupoold
    relay_listen: str  # empty: lends no GPU
    peers: tuple[PeerSettings, ...]
    interruption: int  # seconds

    @property
    def api_socket(self) -> str:
        """The public socket of the gRPC interface."""
        return os.path.join(self.run_dir, "gpupoold.sock")

    @property
    def private_dir(self) -> str:
        """A directory that only gpupoold may enter."""
        return os.path.join(self.run_dir, "private")

    @property
    def root_socket(self) -> str:
        """The interface again, for root and gpupoold's own user."""
        return os.path.join(self.run_dir, ROOT_SOCKET)

    @property
    def broker_socket(self) -> str:
        """Where the broker takes the desired state."""
        return os.path.join(self.run_dir, "broker.sock")

    @property
    def session_socket(self) -> str:
        """Where client programs connect to the broker."""
        return os.path.join(self.run_dir, "session.sock")

    @property
    def hook_socket(self) -> str:
        """Where libvirt's hook asks."""
        return os.path.join(self.run_dir, "hook.sock")

    @property
    def lease_dir(self) -> str:
        """Lease files of running programs, one private directory each."""
        return os.path.join(self.run_dir, "leases")

    def slice_socket_directory(self, virtual_uuid: str) -> str:
        """The directory with a slice's own socket, which the broker makes: SliceSockets."""
        return os.path.join(self.run_dir, "slices", virtual_uuid, "socket")

    @property
    def database(self) -> str:
        """The SQLite file."""
        return os.path.join(self.state_dir, "gpupoold.sqlite3")


def load(arguments: list[str], *, defaults: bool = True) -> tuple[cfg.ConfigOpts, Settings]:
    """Reads command line and files; raises ConfigurationError that names option and file.

    With defaults=False the files of /etc and the home directory are not looked for.
    """
    conf = cfg.ConfigOpts()
    # Before anything reads it: a value that was read is kept.
    log.set_defaults(default_log_levels=["grpc=WARN", "asyncio=WARN"])
    log.register_options(conf)
    for group in opts.GROUPS:
        name = None if group.GROUP == "DEFAULT" else group.GROUP
        conf.register_opts(group.OPTIONS, group=name)
    try:
        _parse(
            conf,
            arguments,
            project="gpupoold",
            prog="gpupoold",
            version=gpupoold.version(),
            default_config_files=None if defaults else [],
            default_config_dirs=None if defaults else [],
            usage="%(prog)s [--config-file FILE]",
        )
        _read_all(conf)
        return conf, _settings(conf)
    except cfg.ConfigFilesNotFoundError as error:
        raise ConfigurationError(
            f"configuration file not found: {', '.join(error.config_files)}"
        ) from None
    except cfg.ConfigFilesPermissionDeniedError as error:
        raise ConfigurationError(
            f"configuration file cannot be read: {', '.join(error.config_files)}"
        ) from None
    except cfg.ConfigFileParseError as error:
        message = error.msg if isinstance(error.msg, str) else str(error.msg)
        raise ConfigurationError(
            f"configuration file {error.config_file} cannot be parsed: {message}"
        ) from None
    except cfg.Error as error:
        raise ConfigurationError(f"configuration: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"a configuration file is not UTF-8: byte {error.object[error.start]:#04x} at offset "
            f"{error.start}"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"configuration file {error.filename} cannot be read: {error.strerror}"
        ) from None


def _parse(conf: cfg.ConfigOpts, arguments: list[str], **keywords: Any) -> None:
    """oslo.config prints, and exits with 1, where a file has a wrong value of certain options."""
    output, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            conf(arguments, **keywords)
    except SystemExit:
        text = output.getvalue() + errors.getvalue()
        wrong = re.fullmatch(r"argument --(\S+): (.+)\s*", text)
        if wrong:
            name = wrong.group(1)
            # conf does not know its files yet.
            files = [
                value.removeprefix("--config-file=")
                for before, value in pairwise(["", *arguments])
                if before == "--config-file" or value.startswith("--config-file=")
            ] or keywords["default_config_files"]
            source = _source(conf, name, "DEFAULT", files or cfg.find_config_files("gpupoold"))
            raise ConfigurationError(f"[DEFAULT] {name} ({source}): {wrong.group(2)}") from None
        sys.stdout.write(output.getvalue())
        sys.stderr.write(errors.getvalue())
        raise


def set_up_logging(conf: cfg.ConfigOpts) -> None:
    """Logging as configured; raises ConfigurationError where that cannot be."""
    try:
        log.setup(conf, "gpupoold")
    except OSError as error:
        raise ConfigurationError(
            f"logging: {error.filename or 'the log'} cannot be written: {error.strerror or error}"
        ) from None
    except Exception as error:  # oslo.log has no error of its own for most options
        raise ConfigurationError(f"logging cannot be set up as configured: {error}") from None


def unknown_options(conf: cfg.ConfigOpts) -> list[str]:
    """A sentence for each line that sets an option which does not exist in one of our groups."""
    known: dict[str, set[str]] = {group.GROUP.lower(): set() for group in opts.GROUPS}
    for group in opts.GROUPS:
        known[group.GROUP.lower()] |= {option.dest for option in group.OPTIONS}
    known["default"] |= {name.replace("-", "_") for name in conf}
    # Deprecated names of oslo.log's options: it is oslo.log that warns of them.
    known["default"] |= {"logfile", "logdir", "log_config", "verbose"}
    sentences = []
    for name in conf.config_file or []:
        section = "DEFAULT"
        with open(name, encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if match := re.match(r"\s*\[([^\]]+)\]", line):
                    section = match.group(1)
                elif (match := re.match(r"([A-Za-z][\w-]*)\s*[=:]", line)) and (
                    section.lower() in known
                    and match.group(1).replace("-", "_") not in known[section.lower()]
                ):
                    sentences.append(
                        f"{name}, line {number}: there is no option {match.group(1)} in [{section}]"
                    )
    return sentences


def _files(conf: cfg.ConfigOpts) -> str:
    return ", ".join(conf.config_file or []) or "the command line"


def _source(
    conf: cfg.ConfigOpts, option: str, group: str, files: Sequence[str] | None = None
) -> str:
    """The file that sets the option, as precisely as can be told."""
    for name in reversed(conf.config_file or [] if files is None else files):
        try:
            with open(name, encoding="utf-8") as stream:
                text = stream.read()
        except OSError:
            continue
        section = "DEFAULT"
        for number, line in enumerate(text.splitlines(), 1):
            if match := re.match(r"\s*\[([^\]]+)\]", line):
                section = match.group(1)
            elif section.lower() == group.lower() and re.match(
                rf"{re.escape(option).replace('_', '[-_]')}\s*[=:]", line
            ):
                return f"{name}, line {number}"
    return _files(conf)


def _wrong(conf: cfg.ConfigOpts, group: str, option: str, value: Any, why: str) -> Exception:
    return ConfigurationError(
        f"[{group}] {option} = {value} ({_source(conf, option, group)}): {why}"
    )


def _read_all(conf: cfg.ConfigOpts) -> None:
    """Reads each option once, since oslo.config checks a value only when it is read."""
    groups = [(None, name) for name in conf] + [
        (group.GROUP, option.dest)
        for group in opts.GROUPS
        if group.GROUP != "DEFAULT"
        for option in group.OPTIONS
    ]
    for group, name in groups:
        if group is None and name in [g.GROUP for g in opts.GROUPS]:
            continue
        try:
            _ = conf[name] if group is None else conf[group][name]
        except (cfg.ConfigFileValueError, ValueError) as error:
            shown = group or "DEFAULT"
            reason = re.sub(r"^Value for option \S+ from .*? is not valid: ", "", str(error))
            raise ConfigurationError(
                f"[{shown}] {name} ({_source(conf, name, shown)}): {reason}"
            ) from None
        except cfg.NoSuchOptError:
            continue


def _settings(conf: cfg.ConfigOpts) -> Settings:
    for name in ("state_dir", "run_dir"):
        if not os.path.isabs(conf[name]):
            raise _wrong(conf, "DEFAULT", name, conf[name], "must be an absolute path")
    run_dir = os.path.normpath(conf.run_dir)
    longest = os.path.join(run_dir, LONGEST_SOCKET)
    if len(os.fsencode(longest)) > SOCKET_PATH_MAX:
        raise _wrong(
            conf,
            "DEFAULT",
            "run_dir",
            run_dir,
            f"too long: {longest} would have {len(os.fsencode(longest))} bytes, and the path of a "
            f"unix socket has at most {SOCKET_PATH_MAX}",
        )
    driver = conf.gpus.driver_directory or ""
    if driver and not os.path.isabs(driver):
        raise _wrong(conf, "gpus", "driver_directory", driver, "must be an absolute path")
    tcp = conf.broker.tcp_listen or ""
    if tcp:
        _check_loopback(conf, tcp)
    if conf.broker.worker_user:
        import pwd

        try:
            pwd.getpwnam(conf.broker.worker_user)
        except KeyError:
            raise _wrong(
                conf,
                "broker",
                "worker_user",
                conf.broker.worker_user,
                "there is no such user on this host",
            ) from None
    size = conf.libvirt.region_size
    if size & (size - 1):
        raise _wrong(conf, "libvirt", "region_size", size, "must be a power of two")
    return Settings(
        host=conf.host,
        state_dir=os.path.normpath(conf.state_dir),
        run_dir=run_dir,
        event_limit=conf.event_limit,
        driver_directory=os.path.normpath(driver) if driver else "",
        memory_reserve_mib=conf.gpus.memory_reserve_mib,
        placement_policy=conf.gpus.placement_policy,
        health_interval=conf.gpus.health_interval,
        max_connections=conf.api.max_connections,
        max_connections_per_user=conf.api.max_connections_per_user,
        worker_threads=conf.api.worker_threads,
        max_slices_per_user=conf.api.max_slices_per_user,
        max_runs_per_user=conf.api.max_runs_per_user,
        broker_tcp_listen=tcp,
        warm_workers=conf.broker.warm_workers,
        warm_context=conf.broker.warm_context,
        worker_user=conf.broker.worker_user,
        max_sessions_per_lease=conf.broker.max_sessions_per_lease,
        max_half_open=conf.broker.max_half_open,
        worker_log_bytes=conf.broker.worker_log_bytes,
        kill_grace_ms=conf.broker.kill_grace_ms,
        worker_host_memory=conf.broker.worker_host_memory,
        rings=conf.broker.rings,
        regions=conf.broker.regions,
        spinners=_spinners(conf.broker.spinners),
        vsock_port=conf.broker.vsock_port,
        cgroup_parent=conf.broker.cgroup_parent,
        disable_seccomp=conf.broker.disable_seccomp,
        worker_environment=dict(conf.broker.worker_environment),
        libvirt_uri=conf.libvirt.uri or "",
        libvirt_attach_devices=conf.libvirt.attach_devices,
        libvirt_region_mib=size,
        libvirt_region_group=conf.libvirt.region_group or "",
        libvirt_interval=conf.libvirt.interval,
        libvirt_qemu_pid_dir=conf.libvirt.qemu_pid_dir,
        cdi_dir=os.path.normpath(conf.containers.cdi_dir) if conf.containers.cdi_dir else "",
        container_library_dirs=_library_dirs(conf),
        **_relay(conf),
    )


def _relay(conf: cfg.ConfigOpts) -> dict[str, Any]:
    """What concerns other hosts."""
    files = {name: conf.relay[name] or "" for name in ("certificate_file", "key_file", "ca_file")}
    for name, path in files.items():
        if path and not os.path.isabs(path):
            raise _wrong(conf, "relay", name, path, "must be an absolute path")
        if not path and any(files.values()):
            raise _wrong(
                conf, "relay", name, "", "certificate_file, key_file and ca_file belong together"
            )
    peer_listen = conf.api.tcp_listen or ""
    if peer_listen and not any(files.values()):
        raise _wrong(
            conf,
            "api",
            "tcp_listen",
            peer_listen,
            "needs [relay] certificate_file, key_file and ca_file: nothing is served over TCP "
            "without TLS",
        )
    if peer_listen:
        _check_address(conf, "api", "tcp_listen", peer_listen)
    listen = conf.relay.listen or ""
    if listen and not any(files.values()):
        raise _wrong(conf, "relay", "listen", listen, "needs certificate_file, key_file, ca_file")
    if listen:
        _check_address(conf, "relay", "listen", listen)
        try:
            ipaddress.ip_address(listen.rpartition(":")[0].strip("[]"))
        except ValueError:
            raise _wrong(conf, "relay", "listen", listen, "must begin with a number") from None
    peers = tuple(_peer(conf, line) for line in conf.relay.peer)
    names = [peer.name for peer in peers]
    for name in names:
        if names.count(name) > 1 or name == conf.host:
            raise _wrong(conf, "relay", "peer", name, "is named twice, or is this host")
    if peers and not any(files.values()):
        raise _wrong(
            conf, "relay", "peer", names[0], "needs certificate_file, key_file and ca_file"
        )
    return {
        **files,
        "peer_listen": peer_listen,
        "relay_listen": listen,
        "peers": peers,
        "interruption": conf.relay.interruption,
    }


def _check_address(conf: cfg.ConfigOpts, group: str, option: str, value: str) -> None:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):(\d{1,5})", value)
    if not match or int(match.group(2)) > 65535:
        raise _wrong(conf, group, option, value, "must be ADDRESS:PORT or [ADDRESS]:PORT")


def _peer(conf: cfg.ConfigOpts, line: str) -> PeerSettings:
    words = line.split()
    limits = {"slices": 0, "compute": 0, "memory": 0}
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name not in limits or not re.fullmatch(r"\d{1,9}", value):
            raise _wrong(conf, "relay", "peer", line, f"{word} is not slices=, compute= or memory=")
        limits[name] = int(value)
    if len(words) < 2:
        raise _wrong(conf, "relay", "peer", line, "must be NAME ADDRESS:PORT [slices=N] …")
    _check_address(conf, "relay", "peer", words[1])
    return PeerSettings(words[0], words[1], limits["slices"], limits["compute"], limits["memory"])


def _spinners(configured: int | None) -> int:
    """Sessions that may spin at once."""
    if configured is not None:
        return configured
    processors = len(os.sched_getaffinity(0))
    return max(1, processors // 4) if processors > 1 else 0


def _library_dirs(conf: cfg.ConfigOpts) -> tuple[str, ...]:
    if conf.containers.cdi_dir and not os.path.isabs(conf.containers.cdi_dir):
        raise _wrong(
            conf, "containers", "cdi_dir", conf.containers.cdi_dir, "must be an absolute path"
        )
    directories = conf.containers.library_dirs
    for directory in directories:
        if not os.path.isabs(directory):
            raise _wrong(conf, "containers", "library_dirs", directory, "must be absolute paths")
    if not directories:
        raise _wrong(conf, "containers", "library_dirs", "", "must have at least one directory")
    return tuple(dict.fromkeys(os.path.normpath(directory) for directory in directories))


def _check_loopback(conf: cfg.ConfigOpts, value: str) -> None:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([0-9.]+)):(\d{1,5})", value)
    try:
        if not match or int(match.group(3)) > 65535:
            raise ValueError
        address = ipaddress.ip_address(match.group(1) or match.group(2))
    except ValueError:
        raise _wrong(
            conf, "broker", "tcp_listen", value, "must be 127.0.0.1:PORT or [::1]:PORT"
        ) from None
    if not address.is_loopback:
        raise _wrong(
            conf,
            "broker",
            "tcp_listen",
            value,
            "only a loopback address is allowed: clients on other hosts come through their own "
            "host",
        )
