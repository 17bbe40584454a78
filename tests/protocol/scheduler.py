"""Lets one process take one small step at a time: any order of arrivals and resumptions."""

from typing import TYPE_CHECKING

from . import calls
from .process import Process

if TYPE_CHECKING:
    from .world import World


class Scheduler:
    def __init__(self, world: "World"):
        self.world = world

    def run_one(self) -> None:
        """Either a request arrives where it goes, or a process runs up to its next one."""
        runnable = [process for process in self.world.processes if process.runnable]
        if not runnable:
            return
        speeds = [self.world.speed[process.id] for process in runnable]
        process = self.world.rng.choices(runnable, speeds)[0]
        if process.request is not None:
            self.carry_out(process)
        else:
            self._resume(process)

    def carry_out(self, process: Process) -> None:
        """The process's request arrives; what it asks for happens at once, or is waited for."""
        service = self.world.service
        request, process.request = process.request, None
        process.waiting, process.waiting_since = request, self.world.time
        match request:
            case calls.Meet():
                service.meet(process)
            case calls.Settle(name):
                service.settle(process, name, self.world.time)
            case calls.Collective():
                self.world.data.post(process, request)
            case calls.Put(folder, key, value):
                if key == "finished":
                    self.world.finish(process)
                process.answer(service.put(folder, key, value))
            case calls.Get(folder, key):
                process.answer(service.get(folder, key))
            case calls.ListFolder(folder):
                process.answer(service.list(folder))
            case calls.Connect():
                service.register(process.id, process.incarnation)
                process.registered = True
                process.answer(None)
            case calls.Reregister():
                self.world.note("REREGISTERS", process)
                self.world.count["reregistrations"] += 1
                process.incarnation = self.world.new_incarnation()
                service.register(process.id, process.incarnation)
                process.answer(None)
            case _:  # Pause
                process.answer(None)

    def _resume(self, process: Process) -> None:
        (value, error), process.reply = process.reply, None
        try:
            if error is None:
                process.request = process.loop.send(value)
            else:
                process.request = process.loop.throw(error)
        except StopIteration:
            self.world.note("LEAVES", process, process.state)
            process.left = True
            self.world.end(process)
        except (calls.SelfCheckFailed, calls.LocalFailure) as failure:
            self.world.kill(process, f"by itself: {failure}")
