"""A relay in user space: what it passes on arrives late, in order (`netem` is in few kernels).

with Relay(host, to=(address, port), delay_s=0.03) as relay:  # listens at relay.port
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType

from support.namespaces import Host, enter

_PIECE = 65_536


class Relay:
    """Listens on a host's own address, on a thread; connects from there.

    Args:
        host: whose network it is in.
        to: address and port to which it passes on.
        delay_s: how late everything arrives, in each direction, seconds.
    """

    def __init__(self, host: Host, *, to: tuple[str, int], delay_s: float) -> None:
        self._host, self._to, self._delay_s = host, to, delay_s
        self.port = 0
        self.passed_on = 0
        """Bytes so far."""
        self._ready = threading.Event()
        self._end: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="relay")

    def __enter__(self) -> Relay:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._thread.join()

    def _run(self) -> None:
        enter(self._host.namespace)  # this thread alone
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, self._host.address, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._end = lambda: loop.call_soon_threadsafe(over.set)
        self._ready.set()
        await over.wait()
        server.close()  # asyncio.run cancels what still passes on

    async def _connected(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, out = await asyncio.open_connection(*self._to)
        except OSError:  # no listener yet
            back.close()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(near, out))
                both.create_task(self._pass_on(far, back))
        except* (OSError, asyncio.CancelledError):
            pass

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def take() -> None:
            while piece := await reader.read(_PIECE):
                pieces.put_nowait((loop.time() + self._delay_s, piece))
            pieces.put_nowait((loop.time() + self._delay_s, b""))

        async with asyncio.TaskGroup() as both:
            both.create_task(take())
            try:
                while True:
                    due, piece = await pieces.get()
                    await asyncio.sleep(due - loop.time())
                    if not piece:
                        break
                    writer.write(piece)
                    self.passed_on += len(piece)
            finally:
                writer.close()
