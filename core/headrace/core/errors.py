"""Errors whose message is meant for a person: what went wrong, where, and what to do. The command line prints it without a traceback."""


class HeadraceError(Exception):
    """Base of all errors that a user can act on."""


class OutageError(HeadraceError):
    """Something that the work needs (the store, Kafka, a disk) does not work now. The work itself is not to blame: see `core.outages`."""


def install_advice(extra: str) -> str:
    """How to install an extra, for an error. It never names a bare package: the name on an index is not Headrace's."""
    return f"Install the extra `{extra}`, from a clone: pip install '.[{extra}]'"
