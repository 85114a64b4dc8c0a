"""Decides which hosts a list such as `node[01-03,07]` names, and how many ranks each takes."""

import re

from mgpu.errors import LaunchError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def expand(text: str) -> list[str]:
    """Return the names of the hosts that `text`, in Slurm's notation, stands for, in its order.

    Args:
        text: names divided by commas, with ranges in brackets.

    Raises:
        LaunchError: the brackets or ranges cannot be read, the list is empty, or the package python-hostlist, which
            knows the notation, is missing and the list has brackets.

    Example:
        >>> expand("node[01-03,07],login")
        ['node01', 'node02', 'node03', 'node07', 'login']
    """
    asked = f"The list of hosts {text!r}"
    form = "It looks like node1,node2 or node[01-03,07]; on Slurm, `scontrol show hostnames` prints what a list means."
    if "[" not in text and "]" not in text:
        names = [name.strip() for name in text.split(",")]
    else:
        try:
            import hostlist
        except ImportError as error:
            raise LaunchError(
                f"{asked} has brackets; the package python-hostlist, which reads them, is not installed. "
                "Install it: pip install 'mgpu[mpi]'"
            ) from error
        try:
            names = hostlist.expand_hostlist(text)
        except hostlist.BadHostlist as error:
            raise LaunchError(
                f"{asked} cannot be read: {error}. A bracket or a range was probably cut. {form}"
            ) from error
    bad = [name for name in names if not _NAME.fullmatch(name)]
    if bad or not names:
        raise LaunchError(
            f"{asked} has {f'a name that no host has: {bad[0]!r}' if bad else 'no name in it'}. A comma or a variable "
            f"that was empty is the usual cause. {form}"
        )
    return names


def with_slots(text: str) -> list[tuple[str, int | None]]:
    """Return host names and the ranks each takes, None where the list doesn't say.

    Args:
        text: like that of `expand`, and each item may end in a colon and a number: "h[1-2]:4,h3".

    Raises:
        LaunchError: as for `expand`; or a number is not above zero.

    Example:
        >>> with_slots("h[1-2]:4,h3")
        [('h1', 4), ('h2', 4), ('h3', None)]
    """
    hosts: list[tuple[str, int | None]] = []
    for item in re.split(r",(?![^\[]*\])", text):  # commas outside brackets
        names, colon, slots = item.strip().partition(":")
        if colon and not (slots.isdigit() and int(slots) > 0):
            raise LaunchError(
                f"The list of hosts {text!r} gives {names} {slots!r} ranks, which is no number above zero. Write, for "
                f"example, {names or 'node1'}:2, or leave the colon out."
            )
        hosts += [(name, int(slots) if colon else None) for name in expand(names)]
    return hosts
