"""gpupoolctl guest: the commands are there, virtual machines come in a later release."""

from __future__ import annotations

import click

from gpupoold.cli.context import not_in_this_release


@click.group()
def group() -> None:
    """Virtual machines (not in this release)."""


@group.command()
@click.argument("domain")
@click.argument("slice_name", metavar="SLICE")
def attach(domain: str, slice_name: str) -> None:
    """Give a slice to a virtual machine (not in this release)."""
    raise not_in_this_release(f"attaching slice {slice_name} to the virtual machine {domain}")


@group.command()
@click.argument("domain")
@click.argument("slice_name", metavar="SLICE")
def detach(domain: str, slice_name: str) -> None:
    """Take a slice from a virtual machine (not in this release)."""
    raise not_in_this_release(f"detaching slice {slice_name} from the virtual machine {domain}")
