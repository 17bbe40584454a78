"""A slow network: a proxy that all connections of a namespace are led over by a rule of nftables.

    python -m tests.slow_proxy PORT

It connects to where the connection was meant to go and hands bytes on, in order, late. Lines of
JSON on its input say how, from then on and on all connections; it answers each with a line.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
import struct
import sys

SO_ORIGINAL_DST = 80
CHUNK_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Manner:
    """How slow. `only` and `beside` are ports: of the connections meant, or of those spared."""

    delay_s: float = 0.0  # each way
    stall_share: float = 0.0  # of the chunks that are held up for
    stall_s: float = 0.0
    only: int | None = None
    beside: int | None = None

    def lateness_s(self, port: int) -> float:
        """How late the next chunk of a connection to `port` is handed on."""
        if self.only not in (None, port) or self.beside == port:
            return 0.0
        return self.delay_s + (self.stall_s if random.random() < self.stall_share else 0.0)


class Proxy:
    """All connections, and the manner they are handled in now."""

    manner = Manner()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("socket").getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
        port, host = struct.unpack_from("!2xH4s", address)
        try:
            far_reader, far_writer = await asyncio.open_connection(socket.inet_ntoa(host), port)
        except OSError:
            writer.transport.abort()  # as the refusal that it was
            return
        await asyncio.gather(
            self.hand_on(reader, far_writer, port), self.hand_on(far_reader, writer, port)
        )

    async def hand_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        """One direction, chunk by chunk; each waits its time while the next ones come in."""
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def receive() -> None:
            clock = asyncio.get_running_loop().time
            while True:
                try:
                    data = await reader.read(CHUNK_BYTES)
                except OSError:
                    data = b""
                late.put_nowait((clock() + self.manner.lateness_s(port), data))
                if not data:
                    return

        receiving = asyncio.create_task(receive())
        clock = asyncio.get_running_loop().time
        try:
            while True:
                due, data = await late.get()
                await asyncio.sleep(max(0.0, due - clock()))
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        receiving.cancel()
        # An end ends both directions: gloo and gRPC never close one alone.
        writer.close()


async def main() -> None:
    proxy, loop = Proxy(), asyncio.get_running_loop()
    await asyncio.start_server(proxy.serve, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    print("ready", flush=True)
    while line := await orders.readline():
        proxy.manner = Manner(**json.loads(line))
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
