"""Who takes part: views, attempts that fail together, the settle, and the keys of a view.

Rules R2, R3, R4, R8 and R9 of the step protocol live here. `live_devices` (jax 0.10.2 to 0.12.0.1)
keeps the answer of its last barrier in `live_devices.devices` as {device: incarnation}; the exit
barrier of one block is the entry barrier of the next.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NoReturn

import jax
from jax.experimental.multihost_utils import ProcessFailureError as ProcessFailureError
from jax.experimental.multihost_utils import live_devices as live_devices

from ftrain import communicators
from ftrain.errors import WORKER_LOST_MEMBERSHIP, WORKER_STUCK, AttemptFailedError
from ftrain.runtime import GLOO_PREFIX, Runtime

SETTLE_TIMEOUT_S = 10  # the service looks at deadlines once a second


@dataclasses.dataclass(frozen=True)
class View:
    """One answer of the liveness barrier: a set of incarnations, not of ids (rule R2).

    A worker that restarts quickly leaves the ids unchanged, and then a comparison of ids would let
    a blank process compute beside trained ones.
    """

    incarnations: tuple[tuple[int, int], ...]  # (worker id, incarnation), by id

    @property
    def workers(self) -> list[int]:
        """The ids of the members, ascending."""
        return [worker for worker, _ in self.incarnations]

    @property
    def lowest(self) -> int:
        """The member that does what one of them has to do."""
        return self.incarnations[0][0]

    @property
    def name(self) -> str:
        """Short for the incarnations."""
        return hashlib.sha256(repr(self.incarnations).encode()).hexdigest()[:16]


class Members:
    """This worker's membership, and what it says to and hears from the other members."""

    def __init__(
        self,
        runtime: Runtime,
        report: Callable[..., None],
        local_error: Callable[[BaseException], NoReturn],
    ):
        self._runtime, self._report, self._local_error = runtime, report, local_error
        self._store = runtime.store
        self.me = runtime.worker
        self._client = self._newest = None
        self._incarnation: int | None = None
        self._cutter: communicators.Cutter | None = None
        self._unmet: list[int] = []  # whose stores are yet to be met in this view (GPU)
        self._settling = False  # the others may be waiting for this worker in the view's settle
        self._gloo_group = ""  # where gloo's members of the view publish their addresses
        self._uses: collections.Counter[View] = collections.Counter()
        self._names: list[str] = []  # whose keys are still in the store, oldest first

    def join(self) -> None:
        """Registers under the worker's own id. The others wait for this worker from here on."""
        self._client = self._newest = self._runtime.connect_member()
        self._runtime.use_member(self._client)
        self._learn_incarnation()

    def _learn_incarnation(self) -> None:
        """Which incarnation the service has just given this worker; said to the coordinator too."""
        self._incarnation = self._client.get_live_nodes([self.me]).get(self.me)
        self._store.key_value_set(
            f"ftrain/incarnation/{self.me}", str(self._incarnation), allow_overwrite=True
        )

    def meet_at_start(self, name: str, workers: list[int]) -> None:
        """Those who begin together wait for one another, so that the first view has them all.

        Only a courtesy: if one of them dies here the others go on without it.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.wait_at_barrier(f"ftrain/start/{name}", SETTLE_TIMEOUT_S * 1000, workers)

    def current_view(self) -> View:
        """The members of this block.

        Ends the process, without another call, if the answer is not about this process: a process
        that outlived its replacement would act in its place (rule R9).
        """
        answer = {d.process_index: i for d, i in live_devices.devices.items()}
        if answer.get(self.me) != self._incarnation:
            self._end(
                f"the barrier's answer {answer} has not incarnation {self._incarnation} of "
                f"worker {self.me}: it was declared dead and may be replaced"
            )
        return View(tuple(sorted(answer.items())))

    def answered(self) -> list[int]:
        """Who is in the barrier's last answer, under whatever incarnation."""
        return sorted({d.process_index for d in live_devices.devices})

    def _end(self, reason: str) -> NoReturn:
        self._report("lost_membership", reason=reason)
        os._exit(WORKER_LOST_MEMBERSHIP)

    def _end_stuck(self) -> NoReturn:
        self._report("stuck", reason="its collective was cancelled and did not end")
        faulthandler.dump_traceback()
        os._exit(WORKER_STUCK)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around the body of a block, inside `live_devices`: a failed attempt fails for everybody.

        `live_devices` alone tells the members of an error only if a process died. So this worker
        takes a new incarnation before it reaches the exit barrier: then the barrier tells
        everybody, itself included, and all abort together (rule R3). Anything but
        `AttemptFailedError` is this worker's own error and ends the process here: at the barrier it
        would wait for peers that wait for it in a collective.
        """
        try:
            yield
        except AttemptFailedError as error:
            self._fail(error)
        except BaseException as error:  # noqa: BLE001  not retried: reported, and the process ends
            self._local_error(error)

    def _fail(self, error: AttemptFailedError) -> None:
        try:
            self._report("attempt_failed", reason=str(error))
            self.cancel()
            self._reregister()
            if self._runtime.cancels_by_incarnation:
                self._runtime.renew_store()
            if self._unmet:
                self._run_aside(self._runtime.meet_stores, self._unmet, for_backend=False)
            if self._settling:
                threading.Thread(target=self._fail_settle, args=(self.name,), daemon=True).start()
        except BaseException as second:  # noqa: BLE001  as above: nothing may reach the barrier
            self._local_error(second)

    def _reregister(self) -> None:
        """Takes a new incarnation, if the id is still this process's to take.

        A process that outlived its replacement would take the id back with stale state, and pass
        every later check (found by the protocol model: committed steps were lost).
        """
        found = self._client.get_live_nodes([self.me]).get(self.me)
        if found != self._incarnation:
            self._end(f"worker {self.me} is incarnation {found} now, not {self._incarnation}")
        # The newest is kept for its heartbeats; barriers and keys stay on the first. The one
        # between goes, and says nothing as it does (shutdown_on_destruction=False).
        self._newest = self._runtime.connect_member()
        self._learn_incarnation()

    def cancel(self) -> None:
        """Ends every member's collective of this view; on GPU its first, the others end by R3."""
        if self._names:
            self._store.key_value_set(self._key("failed"), "1", allow_overwrite=True)

    def settle(self, view: View, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Meets the members of a new view, and learns what each of them holds (rules R4, R5).

        The liveness barrier counts the arrival of a task that has since restarted: only who comes
        here is really there. What each holds is published under the view's own name before the
        meeting and read after it; a key that is overwritten could be read late.

        The same incarnations can come back (a joiner came and died, and no attempt failed by it),
        so keys and barrier carry the count of uses too; the members agree on it, since each has
        seen every use (found by the protocol model: a stop that was published first was not seen).

        Args:
          view: a view that is not agreed on yet.
          mine: what this worker holds, as plain JSON.

        Returns:
          What each member holds, by id.

        Raises:
          AttemptFailedError: not all came in time.
        """
        self._leave_view()
        self._uses[view] += 1
        self._names.append(f"{view.name}.{self._uses[view]}")
        self._settling, self._unmet = True, []
        with calls_that_fail("settle"):
            # For the coordinator: should one of these die before all have met and connected, nobody
            # but the coordinator can tell the others, who wait for it (see its `_release`).
            self._store.key_value_set(
                f"ftrain/settling/{self.me}",
                json.dumps({"name": self.name, "incarnations": dict(view.incarnations)}),
                allow_overwrite=True,
            )
            if self._runtime.cancels_by_incarnation and len(view.workers) > 1:
                self._unmet = view.workers
                mine = {**mine, "store": self._runtime.store_incarnation()}
            self._store.key_value_set(self._key(f"holds/{self.me}"), json.dumps(mine))
            self._clean(view, keep=2)
            self._meet(view.workers)
            holds = self._read_ids(self._key("holds"))
            self._settling = False
            self._meet_stores({w: held.get("store") for w, held in holds.items()})
            return holds

    def _meet(self, workers: list[int]) -> None:
        self._client.wait_at_barrier(f"ftrain/settle/{self.name}", SETTLE_TIMEOUT_S * 1000, workers)

    def _fail_settle(self, name: str) -> None:
        """Fails the settle of that name for the others, who would wait in it until its deadline.

        By a call with other participants, one of whom never comes; repeated for a while, both as in
        the coordinator's `_release`.
        """
        nobody = self._runtime.workers + 1  # of the coordinator's tasks, the one never there
        for pause_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5):
            time.sleep(pause_s)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.wait_at_barrier(f"ftrain/settle/{name}", 2000, [self.me, nobody])

    @property
    def name(self) -> str:
        """Names the use of a view that was settled last: its barrier, keys and records."""
        return self._names[-1] if self._names else ""

    def open_devices(self, view: View) -> list[jax.Device]:
        """Fresh devices for the collectives of a settled view, in the order of `view.workers`."""
        if len(view.workers) == 1:
            return jax.local_devices()
        if self._runtime.cancels_by_incarnation:
            # JAX cancels a sum by itself, but not while NCCL connects (jax 0.11.2): there the key
            # is listened to, as on CPU.
            self._cutter = self._listen_for_failure(set, set(), self._end_stuck)
            return [d for d in jax.devices() if d.process_index in view.workers]
        before = communicators.listening_ports()
        with calls_that_fail("a new CPU client"):
            devices = self._runtime.new_view_devices()
        own = communicators.listening_ports() - before
        with calls_that_fail("publishing the view's ports"):
            self._store.key_value_set(self._key(f"ports/{self.me}"), json.dumps(sorted(own)))
        ports = self._key("ports")
        self._cutter = self._listen_for_failure(lambda: self._peer_ports(ports), own)
        members = [d for d in devices if d.process_index in view.workers]
        self._gloo_group = GLOO_PREFIX + ",".join(str(d.id) for d in members) + "/"
        return members

    def _listen_for_failure(
        self,
        peer_ports: Callable[[], set[int]],
        own_ports: set[int],
        stuck: Callable[[], None] | None = None,
    ) -> communicators.Cutter:
        failed = self._key("failed")
        return communicators.Cutter(
            lambda: self._wait_for_failure(failed), peer_ports, own_ports, stuck
        )

    def _meet_stores(self, expected: dict[int, int | None]) -> None:
        """Tells this worker's backend which incarnations its collectives are with (GPU).

        Args:
          expected: the incarnations of the view's stores, as each has said.

        Raises:
          AttemptFailedError: one of them is another by now: its own attempt has failed since, or it
            died, and it would be missed in the first collective.
        """
        if not self._unmet:
            return
        with calls_that_fail("meeting the view's stores"):
            found = self._run_aside(
                self._runtime.meet_stores, self._unmet, for_backend=True
            ).result(timeout=SETTLE_TIMEOUT_S)
        if found != expected:
            raise AttemptFailedError(f"the stores {expected} are {found} by now")
        self._unmet = []

    @staticmethod
    def _run_aside(call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Runs a call of the service that has no deadline in a thread that can be left behind."""
        result: Future[Any] = Future()

        def work() -> None:
            try:
                result.set_result(call(*args, **options))
            except jax.errors.JaxRuntimeError as error:
                result.set_exception(error)

        threading.Thread(target=work, name="ftrain-aside", daemon=True).start()
        return result

    @property
    def cutter(self) -> communicators.Cutter | None:
        """Runs the collectives of this view and ends them when it fails; None for a view of one."""
        return self._cutter

    def end_connecting(self) -> None:
        """Lets go of gloo's connecting, given up by this worker and under way in another thread.

        It waits for the address of a member that died, and would take the next group's for it,
        whose members may be the same. So the missing addresses are set, to a port where nobody
        listens.
        """
        if self._runtime.cancels_by_incarnation:
            return  # NCCL's is keyed by incarnations, which will be others
        group = dict(self._store.key_value_dir_get_bytes(self._gloo_group))
        known = next(iter(group.values()), None)
        if known is None:
            return  # nobody has got so far
        nowhere = communicators.address_of_nobody(known)
        for rank in range(self._gloo_group.count(",") + 1):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is there
                self._store.key_value_set_bytes(f"{self._gloo_group}{rank}", nowhere)

    def publish(self, what: str, value: Any) -> None:
        """Sets a fact of the view, once, for all its members to `read` after a collective."""
        with calls_that_fail(f"publishing {what}"):
            self._store.key_value_set(self._key(what), json.dumps(value))

    def read(self, what: str) -> Any:
        """What the donor published before the collective that has just ended."""
        with calls_that_fail(f"reading {what}"):
            return json.loads(
                self._store.blocking_key_value_get(self._key(what), SETTLE_TIMEOUT_S * 1000)
            )

    def _wait_for_failure(self, key: str) -> None:
        try:
            # Blocks in C++ without the interpreter's lock. A week: longer than any view matters.
            self._store.blocking_key_value_get(key, 7 * 24 * 3600 * 1000)
        except jax.errors.JaxRuntimeError as error:
            raise ConnectionError(str(error)) from error

    def _peer_ports(self, key: str) -> set[int]:
        return {port for ports in self._read_ids(key).values() for port in ports}

    def _leave_view(self) -> None:
        """The last view is over; its listener, waiting in the service, is let go by its own key."""
        if self._cutter is not None:
            self._cutter.end()
            self.cancel()
            self._cutter = None

    def _clean(self, view: View, keep: int) -> None:
        """Deletes the keys of old views and of gloo's old groups. The newest may still be read.

        Each member deletes what it knows of: whoever is the lowest may have come only now.
        """
        for name in self._names[:-keep]:
            self._store.key_value_delete(f"ftrain/view/{name}/")
        del self._names[:-keep]
        if self.me == view.lowest:  # before the settle, so that nobody has begun a new group
            self._store.key_value_delete(GLOO_PREFIX)

    def _key(self, what: str) -> str:
        return f"ftrain/view/{self.name}/{what}"

    def _read_ids(self, key: str) -> dict[int, Any]:
        rows = self._store.key_value_dir_get(key + "/")
        return {int(name.rsplit("/", 1)[1]): json.loads(value) for name, value in rows}


@contextlib.contextmanager
def calls_that_fail(what: str) -> Iterator[None]:
    """Calls whose failure may be another's doing: the attempt fails, and all try again."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError, TimeoutError) as error:
        raise AttemptFailedError(f"{what}: {error}") from error
