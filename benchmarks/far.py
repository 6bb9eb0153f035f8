"""A proxy that makes a server farther away: `python -m benchmarks.far PORT TARGET SECONDS`."""

from __future__ import annotations

import asyncio
import sys


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(65_536):
        loop.call_later(delay, writer.write, data)
    loop.call_later(delay, writer.close)


async def main(port: int, target: int, seconds: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(forward(reader, requests, seconds), forward(answers, writer, 0.0))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
