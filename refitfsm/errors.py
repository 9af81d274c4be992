"""What can go wrong, and whose fault it is.

RefitError                  expected: catch it, read it, act on its remedy
 ├─ ConfigError             a policy, a fleet or an argument is wrong; raised before anything is sent
 ├─ CommandRefused          not legal in this state; nothing was sent
 ├─ CycleAborted            the cycle ended without reaching its goal; carries the summary
 ├─ NotServing              no server may answer a request now
 ├─ RequestFailed           a server did not answer a request
 ├─ ControllerClosed        you closed it
 └─ AuditError              the journal could not be written or is not true
DriverProtocolError         a driver broke its contract
InvariantViolation          a law is broken: our bug. Never caught broadly, so not a RefitError
"""


class RefitError(Exception):
    """Expected trouble. The message is one line: who, in which state, which rule, what to do."""


class ConfigError(RefitError):
    """Something given is wrong, and it was seen before anything was sent."""


class CommandRefused(RefitError):
    """What was asked is not legal now. Nothing was sent and nothing changed."""

    def __init__(self, server: str, state: str, rule: str, remedy: str) -> None:
        super().__init__(server, state, rule, remedy)  # as they came: an error may travel between processes
        self.server = server
        self.state = state
        self.rule = rule
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.server} ({self.state}): refused, {self.rule} does not hold: {self.remedy}"


class CycleAborted(RefitError):
    """A cycle ended without reaching its goal.

    Attributes:
        failed: servers that dropped out, with the reason.
        lost: servers that cannot be used again before a restart or a full push.
    """

    def __init__(
        self, message: str, failed: tuple[tuple[str, str], ...] = (), lost: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.failed = failed
        self.lost = lost


class NotServing(RefitError):
    """No server's gate is open. Retry after the cycle, or wait by passing `wait_s`."""


class RequestFailed(RefitError):
    """A server did not answer a request; the request may be sent again."""


class ControllerClosed(RefitError):
    """The fleet was shut down by its owner."""


class AuditError(RefitError):
    """The journal could not be written, or does not hold: nothing further is issued."""


class DriverProtocolError(Exception):
    """A driver answered something that its contract does not allow."""


class InvariantViolation(Exception):
    """A law of the fleet is broken. Stop, keep what serves serving, and report it."""
