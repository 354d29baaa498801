"""The command tree, options and exit statuses."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

import gpupoold
from gpupoold import errors

DEFAULT_CONNECT = "unix:/run/gpupool/gpupoold.sock"


class LazyGroup(click.Group):
    """A group whose commands are imported when they are named."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]] | None = None, **kw: Any):
        """lazy: command -> ("module:attribute", one line of help)."""
        super().__init__(*args, **kw)
        self._lazy = lazy or {}

    def list_commands(self, context: click.Context) -> list[str]:
        """In the order in which they were given."""
        return list(self._lazy)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Imports the command's module."""
        if name not in self._lazy:
            return None
        module, _, attribute = self._lazy[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"gpupoolctl {gpupoold.version()}")
        context.exit()


EPILOG = (
    "Exit status: 0 ok, 1 other failure, 2 usage, 3 not found, 4 no capacity, 5 conflict, "
    "6 daemon unreachable, 7 not permitted; `run` passes on the program's own."
)


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    lazy={
        "gpu": ("gpupoold.cli.gpu:group", "The cards of this host."),
        "slice": ("gpupoold.cli.slice:group", "Parts of cards."),
        "run": ("gpupoold.cli.run:run", "Run a program on a slice."),
        "lease": ("gpupoold.cli.lease:group", "Who holds which slices."),
        "session": ("gpupoold.cli.session:group", "Running programs."),
        "guest": ("gpupoold.cli.guest:group", "Virtual machines that have slices."),
        "topology": ("gpupoold.cli.topology:topology", "Where the cards are in the machine."),
        "events": ("gpupoold.cli.events:events", "What happened."),
        "api": ("gpupoold.cli.api:api", "Which CUDA driver functions are served."),
    },
)
@click.option(
    "--connect",
    metavar="ADDRESS",
    envvar="GPUPOOL_CONNECT",
    default=DEFAULT_CONNECT,
    show_default=True,
    show_envvar=True,
    help="Where gpupoold is: unix:PATH.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(context: click.Context, connect: str, as_json: bool) -> None:
    """Carve GPUs into slices and run CUDA programs on them."""
    from gpupoold.cli.context import Cli

    context.obj = Cli(connect, as_json)
    context.call_on_close(context.obj.close)


def _problem(error: OSError) -> str:
    if error.filename is None:
        return f"the output cannot be written: {error.strerror or error}"
    return f"{error.filename}: {error.strerror}"


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and ends with its exit status."""
    from gpupoold.cli.context import CommandError

    try:
        status = cli.main(args=arguments, prog_name="gpupoolctl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except CommandError as error:
        from gpupoold.model import printable

        click.echo(f"gpupoolctl: {printable(str(error))}", err=True)
        status = error.exit_status
    except (click.Abort, KeyboardInterrupt):
        status = 130
    except BrokenPipeError:
        # The reader of our output left: no traceback at the flush of the interpreter's end.
        sys.stdout = None  # type: ignore[assignment]
        status = errors.EXIT_OTHER
    except UnicodeEncodeError:
        # Python's way to hold bytes of the command line that are no UTF-8.
        click.echo("gpupoolctl: an argument is not valid UTF-8", err=True)
        status = errors.EXIT_USAGE
    except OSError as error:
        sys.stdout = None  # type: ignore[assignment]
        click.echo(f"gpupoolctl: {_problem(error)}", err=True)
        status = errors.EXIT_OTHER
    sys.exit(status if isinstance(status, int) else errors.EXIT_OK)
