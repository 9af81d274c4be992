"""The one exception of this package."""


class WeightsError(ValueError):
    """Weights that cannot be sent as they are.

    The message is one line: the file or tensor, what is wrong with it, and what to do.
    """
