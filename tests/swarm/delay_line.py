"""A line over distance, on loopback: TCP proxies that hold every byte for one way's delay and let so many pass a second.

    python delay_line.py --delay-ms 50 [--mbps 100] LISTEN:TARGET...     ports of 127.0.0.1; prints `ready` once all listen

A proxy has one rate for all its connections in each direction, as a machine's uplink and downlink have. Buffers hold one
bandwidth-delay product and a quarter of a second more, then the sender has to wait, as with a router. TCP itself runs over loopback:
its own start over a long line is not in the figures (connections of a swarm live for hours).
"""
import argparse
import asyncio
import collections
import time

READ_BYTES = 256 << 10


class Direction:
    """The line in one direction: a clock for the rate, shared by all connections of a proxy."""

    def __init__(self, delay_s, bytes_per_s):
        self.delay_s, self.bytes_per_s, self.free_at = delay_s, bytes_per_s, 0.0
        self.most = None if bytes_per_s is None else int(bytes_per_s * (2 * delay_s + 0.25)) + READ_BYTES

    def arrives(self, count):
        """When the last of `count` bytes that are sent now is at the other side."""
        now = time.monotonic()
        if self.bytes_per_s is None:
            return now + self.delay_s
        self.free_at = max(now, self.free_at) + count / self.bytes_per_s
        return self.free_at + self.delay_s


async def carry(reader, writer, direction):
    """Bytes from one socket to another, each as late as the line makes it."""
    queue, held, wake, ended = collections.deque(), 0, asyncio.Event(), False

    async def receive():
        nonlocal held, ended
        try:
            while data := await reader.read(READ_BYTES):
                queue.append((direction.arrives(len(data)), data))
                held += len(data)
                wake.set()
                while direction.most is not None and held > direction.most:
                    await asyncio.sleep(0.001)
        except OSError:
            pass
        ended = True
        wake.set()

    receiver = asyncio.create_task(receive())
    try:
        while True:
            if not queue:
                if ended:
                    break
                wake.clear()
                await wake.wait()
                continue
            at, data = queue.popleft()
            if (pause := at - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            writer.write(data)
            await writer.drain()
            held -= len(data)
        writer.write_eof()
    except (OSError, RuntimeError):
        pass
    finally:
        receiver.cancel()


async def serve(listen, target, delay_s, bytes_per_s):
    up, down = Direction(delay_s, bytes_per_s), Direction(delay_s, bytes_per_s)

    async def connected(reader, writer):
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        for one in (writer, there_writer):
            one.transport.set_write_buffer_limits(high=4 << 20)
        await asyncio.gather(carry(reader, there_writer, up), carry(there_reader, writer, down))
        for one in (writer, there_writer):
            one.close()

    return await asyncio.start_server(connected, "127.0.0.1", listen)


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, required=True, help="of one way")
    parser.add_argument("--mbps", type=float, help="in each direction; without it there is no limit")
    parser.add_argument("lines", nargs="+", metavar="LISTEN:TARGET")
    args = parser.parse_args()
    rate = None if args.mbps is None else args.mbps * 1e6 / 8
    servers = []
    for line in args.lines:
        listen, target = map(int, line.split(":"))
        servers.append(await serve(listen, target, args.delay_ms / 1e3, rate))
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


asyncio.run(main())
