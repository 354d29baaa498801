"""gpupoolctl run: becomes the program, with everything in its environment that it needs."""

from __future__ import annotations

import os
import shutil
import sys
import time
import uuid
from typing import Any

import click

from gpupoold.cli.context import Cli, CommandError
from gpupoold.cli.slice import share_options, size_options

LEASE_FILE = "GPUPOOL_LEASE_FILE"
NOT_FOUND = 127
NOT_EXECUTABLE = 126
ASK_SECONDS = 1.0  # between two questions of who waits for room


def environment(base: dict[str, str], lease_file: str, client_directory: str) -> dict[str, str]:
    """The program's environment: the client library first in the search path, and the lease."""
    result = dict(base)
    rest = [
        part
        for part in base.get("LD_LIBRARY_PATH", "").split(":")
        if part and part != client_directory
    ]
    result["LD_LIBRARY_PATH"] = ":".join([client_directory, *rest])
    result[LEASE_FILE] = lease_file
    return result


def find_program(name: str) -> str:
    """The path of the program; raises CommandError with the shell's exit statuses."""
    found = shutil.which(name)
    if found:
        return found
    if os.path.sep in name and os.path.exists(name):
        raise CommandError(f"{name} is not an executable file", NOT_EXECUTABLE)
    raise CommandError(f"{name}: there is no such program", NOT_FOUND)


def _start(cli: Cli, request: Any) -> Any:
    """Asks until there is room, if the request has a ticket; tells on standard error how it is."""
    shown = (0, "")
    while (reply := cli.call("StartRun", request)).place:
        if shown != (reply.place, reply.why):
            shown = (reply.place, reply.why)
            click.echo(f"gpupoolctl: waiting, place {reply.place}: {reply.why}", err=True)
        time.sleep(ASK_SECONDS)
    return reply


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--slice", "slice_name", metavar="N", help="An existing slice.")
@size_options(required=False)
@click.option("--gpu", default="", metavar="UUID", help="The card of a temporary slice.")
@click.option("--wait", is_flag=True, help="Wait for room: by priority, then first come.")
@share_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context,
    slice_name: str | None,
    compute: int | None,
    memory: int | None,
    gpu: str,
    wait: bool,
    mode: str,
    priority: int | None,
    command: tuple[str, ...],
) -> None:
    """Run a CUDA program on a slice: `run --slice N -- CMD` or
    `run --compute PCT --memory MIB -- CMD`.

    The second form makes a slice for this one process, on this host or, where that has no room, on
    another one of the pool, and removes it when the process ends. The
    program's exit status is passed on. Device queries of CUDA see the slice; nvidia-smi and other
    users of NVML still see the host's own driver.
    """
    cli: Cli = context.obj
    if (slice_name is None) == (compute is None and memory is None):
        raise click.UsageError("give either --slice, or --compute and --memory")
    if slice_name is None and (compute is None or memory is None):
        raise click.UsageError("--compute and --memory belong together")
    if slice_name == "":
        raise click.UsageError("--slice needs a name")
    if slice_name is not None and (gpu or priority is not None or mode != "hard"):
        raise click.UsageError("--gpu, --mode and --priority belong to a temporary slice")
    if slice_name is not None and wait:
        raise click.UsageError("--wait belongs to a temporary slice")
    program = find_program(command[0])

    from gpupoold.api import gpupool_pb2 as pb

    reply = _start(
        cli,
        pb.StartRunRequest(
            ticket=str(uuid.uuid4()) if wait else "",
            slice=slice_name or "",
            compute_percent=compute or 0,
            memory_mib=memory or 0,
            gpu=gpu,
            mode=mode,
            priority=priority or 0,
            has_priority=priority is not None,
            command=os.fsencode(" ".join(command)).decode("utf-8", "replace"),
        ),
    )
    library = os.path.join(reply.client_directory, "libcuda.so.1")
    if not os.path.exists(library):
        raise CommandError(f"the client library {library} is missing: is gpupool fully installed?")
    cli.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # From here on this process is the program: the lease's process id stays the same, and its
    # exit status needs no passing on.
    try:
        os.execve(  # noqa: S606
            program,
            list(command),
            environment(dict(os.environ), reply.lease_file, reply.client_directory),
        )
    except OSError as error:
        raise CommandError(
            f"{program} cannot be executed: {error.strerror}", NOT_EXECUTABLE
        ) from None
