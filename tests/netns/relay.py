"""Relays that can stop to forward, without root: ``python -m tests.netns.relay PORT:TARGET...``, all on loopback.

A line of JSON on standard input names the links that are cut from now on, by position. Their connections stay open and
nothing passes, in either direction, as between hosts that lost each other; what was sent meanwhile arrives at the mend.
"""

import asyncio
import contextlib
import json
import sys

CHUNK_BYTES = 1 << 16


class Link:
    """One relay."""

    def __init__(self) -> None:
        self.is_whole = asyncio.Event()
        self.is_whole.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
        """Pass bytes between a client and the target until either ends."""
        with contextlib.suppress(OSError):
            await self.is_whole.wait()
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", target)
            directions = [self._pass(reader, up_writer), self._pass(up_reader, writer)]
            tasks = [asyncio.create_task(each) for each in directions]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            up_writer.close()
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self.is_whole.wait()
            writer.write(data)
            await writer.drain()


async def main() -> None:
    """Listen, say so, obey until standard input ends."""
    links = []
    for pair in sys.argv[1:]:
        port, target = map(int, pair.split(":"))
        link = Link()
        links.append(link)
        await asyncio.start_server(lambda r, w, link=link, target=target: link.serve(r, w, target), "127.0.0.1", port)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        cut = json.loads(line)
        for number, link in enumerate(links):
            link.is_whole.clear() if number in cut else link.is_whole.set()
        print(flush=True)


if __name__ == "__main__":
    asyncio.run(main())
