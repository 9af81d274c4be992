"""The one way in which an auditor says no."""


class Broken(Exception):
    """The journal does not hold; the message says why."""
