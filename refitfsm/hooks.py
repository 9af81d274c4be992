"""What a trainer wants done at a point of a refit."""

from collections.abc import Awaitable, Callable, Coroutine

from refitfsm.errors import ConfigError

Hook = Callable[[], Awaitable[None] | None]
"""A function, or a coroutine function."""


async def called(hook: Hook) -> None:
    """Call a hook, and wait for it if it is a coroutine function's."""
    done = hook()
    if done is not None:
        await done


def called_plainly(hook: Callable[[], None]) -> None:
    """Call a hook where nothing can be awaited.

    Raises:
        ConfigError: it is a coroutine function.
    """
    left: object = hook()  # type: ignore[func-returns-value]  # a coroutine, by mistake
    if isinstance(left, Coroutine):
        left.close()
        raise ConfigError("hooks of a BlockingFleet are plain functions: this one is a coroutine function")
