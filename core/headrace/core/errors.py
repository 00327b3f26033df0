"""The error whose message is meant for a person: what went wrong, where, and what to do. The command line prints it without a traceback."""


class HeadraceError(Exception):
    """Base of all errors that a user can act on."""
