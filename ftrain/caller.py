"""An agent's calls to its head: where, how often, and until when. No jax."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from ftrain.addresses import dial_addresses
from ftrain.endpoint import Endpoint, parse_endpoint
from ftrain.errors import EXIT_REFUSED, EXIT_TRY_AGAIN, AddressError
from ftrain.verdict import Verdict
from ftrain.wire import SilentError, Wire, WireError, call_head

CALL_EVERY_S = 1.0
CALL_TIMEOUT_S = 3.0
REFUSED_FOR_S = 10.0  # a token that is not the head's for so long will not become it


class Caller:
    """Calls the head about once a second, until it answers or time is up.

    Args:
      head: where it is, as the user says.
      patience_s: for its name to resolve.
      give_up_s: how long it may be away.
      token: gives the run's token, or None while there is none.
      run_dir: where the head writes the token, for a message.

    Attributes:
      addresses: where it is called, best first.
      why: why nobody has answered yet, or what was lost.

    Raises:
      AddressError: there is nothing to call.
    """

    def __init__(
        self,
        head: Endpoint,
        *,
        patience_s: float,
        give_up_s: float,
        token: Callable[[], bytes | None],
        run_dir: str,
        instead: str,
    ):
        self._given = self._head = head
        self._give_up_s, self._token, self._run_dir = give_up_s, token, run_dir
        self.why = "it was not called yet"
        self._call_at = float("-inf")
        self._alone_since = time.monotonic()
        self._refused_since: float | None = None
        self._was_there = False
        self.addresses = (
            [parse_endpoint(instead, "head")]
            if instead
            else dial_addresses(head, patience_s=patience_s)
        )
        self.call_at(instead)

    @property
    def head(self) -> Endpoint:
        """Where it is, by the name that the user knows."""
        return self._head

    def call_at(self, instead: str) -> None:
        """Has another host called, HOST:PORT; "": where the user said."""
        head = parse_endpoint(instead, "head") if instead else self._given
        if head != self._head:
            self._head, self._call_at = head, float("-inf")
            self._alone_since, self._refused_since = time.monotonic(), None
            if instead:
                self.addresses = [head]
            else:
                self._resolve()

    def lost(self, why: str) -> None:
        """The connection has ended."""
        self._alone_since, self.why, self._was_there = time.monotonic(), why, True

    def given_up(self, now: float) -> Verdict | None:
        """What it means that nobody has answered for so long, if it is long enough."""
        if self._refused_since is not None and now - self._refused_since > REFUSED_FOR_S:
            advice = "give the same FTRAIN_TOKEN or --token-file on every host"
            return Verdict(EXIT_REFUSED, f"{self.why}; {advice}")
        if now - self._alone_since <= self._give_up_s:
            return None
        return Verdict(
            EXIT_TRY_AGAIN,
            f"the head, {self._head}, was not reached for start_timeout_s="
            f"{self._give_up_s:g}: {self.why}",
        )

    def call(self, now: float) -> Wire | None:
        """A connection to the head, if it is time to call and it answers."""
        if now < self._call_at:
            return None
        self._call_at = now + CALL_EVERY_S
        token = self._token()
        if token is None:
            self.why = (
                f"no token in {self._run_dir}, where the head writes it; share the folder, "
                "or give FTRAIN_TOKEN or --token-file on every host"
            )
            return None
        for address in self.addresses:
            try:
                wire = call_head(tuple(address), token, CALL_TIMEOUT_S)
            except OSError as error:
                self._refused_since = None
                self.why = f"{address}: {error.strerror or error}"
            except WireError as error:
                self.why = f"{address}: {error}"
                # The head that was there may be stopped; any other answer is no head's.
                if not (self._was_there and isinstance(error, SilentError)):
                    self._refused_since = self._refused_since or now
            else:
                self._refused_since = None
                return wire
        self._resolve()
        return None

    def _resolve(self) -> None:
        with contextlib.suppress(AddressError):  # another pod of its name has another address
            self.addresses = dial_addresses(self._head, patience_s=0)
