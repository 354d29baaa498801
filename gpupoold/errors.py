"""Errors with one sentence each, and the exit statuses that they lead to.

`PoolError`s answer a request (gRPC status, exit status of gpupoolctl); `StartError`s end gpupoold.
"""

from __future__ import annotations

# Exit statuses of gpupoold.
EXIT_CONFIGURATION = 2
EXIT_DRIVER = 3
EXIT_STATE = 4
EXIT_SOCKET = 5

# Exit statuses of gpupoolctl.
EXIT_OK = 0
EXIT_OTHER = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_NO_CAPACITY = 4
EXIT_CONFLICT = 5
EXIT_UNREACHABLE = 6
EXIT_NOT_PERMITTED = 7

# gRPC status name -> exit status of gpupoolctl.
EXIT_OF_STATUS = {
    "INVALID_ARGUMENT": EXIT_USAGE,
    "NOT_FOUND": EXIT_NOT_FOUND,
    "RESOURCE_EXHAUSTED": EXIT_NO_CAPACITY,
    "ALREADY_EXISTS": EXIT_CONFLICT,
    "FAILED_PRECONDITION": EXIT_CONFLICT,
    "ABORTED": EXIT_CONFLICT,
    "UNAVAILABLE": EXIT_UNREACHABLE,
    "DEADLINE_EXCEEDED": EXIT_UNREACHABLE,
    "CANCELLED": EXIT_UNREACHABLE,
    "PERMISSION_DENIED": EXIT_NOT_PERMITTED,
    "UNAUTHENTICATED": EXIT_NOT_PERMITTED,
}


class PoolError(Exception):
    """A request that cannot be met; `status` is the name of a gRPC status code."""

    status = "UNKNOWN"


class InvalidRequest(PoolError):
    """The request makes no sense."""

    status = "INVALID_ARGUMENT"


class NotFound(PoolError):
    """No such GPU, slice, lease or session."""

    status = "NOT_FOUND"


class NoCapacity(PoolError):
    """No card has room."""

    status = "RESOURCE_EXHAUSTED"


class NoRoom(NoCapacity):
    """No card of this host has room; another host's may."""


class AlreadyExists(PoolError):
    """The name is taken."""

    status = "ALREADY_EXISTS"


class Conflict(PoolError):
    """What is there does not allow it now."""

    status = "FAILED_PRECONDITION"


class NotPermitted(PoolError):
    """It is not the caller's."""

    status = "PERMISSION_DENIED"


class NotInThisRelease(PoolError):
    """Described, and not built yet."""

    status = "UNIMPLEMENTED"


class BrokerUnavailable(PoolError):
    """The broker is needed and is not there."""

    status = "UNAVAILABLE"


class StateWriteFailed(PoolError):
    """The change could not be stored; nothing was changed."""

    status = "INTERNAL"


class StartError(Exception):
    """gpupoold cannot start or go on; `exit_status` tells which kind."""

    exit_status = 1


class ConfigurationError(StartError):
    """A wrong value or file of the configuration."""

    exit_status = EXIT_CONFIGURATION


class DriverError(StartError):
    """The configured driver does not work."""

    exit_status = EXIT_DRIVER


class StateError(StartError):
    """The state cannot be read or written."""

    exit_status = EXIT_STATE


class SocketError(StartError):
    """The socket is in use or cannot be made."""

    exit_status = EXIT_SOCKET
