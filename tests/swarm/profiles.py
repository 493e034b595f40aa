"""Lines, devices and floors of the laboratory. Pure."""
import math

HIDDEN, BLOCKS, ACTIVATION_BYTES = 8192, 80, 2  # as Llama 70B, states in bfloat16
CHUNK_TOKENS = 1024  # Petals' client cuts batches for forward and backward passes into such pieces
QUEUE_MS = 100  # of every line

# Microseconds of one block of Llama 70B, estimated: a decode step in NF4 as Petals' kernels have it, each further row of a batch as ours
# add it, and a token of a long batch at a third of the peak of the matrix units.
DEVICES = {
    "a100": {"step_us": 2000, "row_us": 60, "token_us": 17},
    "t4": {"step_us": 5000, "row_us": 150, "token_us": 80},
    "none": {"step_us": 0, "row_us": 0, "token_us": 0},
}

# Round trips in ms between regions, and within them. Estimated from the public round trips of clouds.
ROUND_TRIPS = {("eu", "eu"): 25, ("us", "us"): 40, ("eu", "us"): 110}

# The map of the Petals paper (arXiv:2312.08361, section 4.2): 14 servers in Europe and North America with 100 to 1,000 Mbit/s, four of
# them behind NATs. Region, Mbit/s, whether behind a NAT; in the order of the blocks.
WORLD = [("eu", 1000, False), ("eu", 100, True), ("us", 500, False), ("eu", 300, False), ("us", 1000, False), ("us", 100, True),
         ("eu", 1000, False), ("eu", 200, False), ("us", 200, True), ("us", 1000, False), ("eu", 100, False), ("eu", 500, True),
         ("us", 300, False), ("eu", 1000, False)]


class Profile:
    """Lines of a client, a hub and servers. Round trips in ms; the hub is where all join the swarm, and a relay."""

    def __init__(self, name, round_trip=None, mbps=None):
        self.name, self.round_trip, self.mbps = name, round_trip, mbps

    def is_natted(self, server):
        return self.round_trip is None and WORLD[server][2]

    def mbps_of(self, server):
        return self.mbps or WORLD[server][1]

    @property
    def client_mbps(self):
        return self.mbps or 500

    def one_way(self, a, b):
        """Milliseconds between two of: servers by number, `hub`, `client`."""
        if a == b:
            return 0
        if self.round_trip is not None:
            return self.round_trip / 2
        regions = tuple(sorted("eu" if x in ("hub", "client") else WORLD[x][0] for x in (a, b)))
        return ROUND_TRIPS[regions] / 2


# near, mid and far are the artificial networks of the Petals paper, table 3.
PROFILES = {profile.name: profile for profile in (
    Profile("none", 0, 10000), Profile("near", 5, 1000), Profile("mid", 5, 100), Profile("far", 100, 100), Profile("world"))}


def spans(servers):
    """Blocks of every server, as even as can be."""
    cuts = [BLOCKS * i // servers for i in range(servers + 1)]
    return list(zip(cuts, cuts[1:]))


def bytes_ms(count, mbps):
    return count * 8 / (mbps * 1e3)


def states_bytes(tokens):
    return tokens * HIDDEN * ACTIVATION_BYTES


def step_floor(profile, servers, device):
    """Milliseconds that a step cannot be faster than: the client to the first server, each to the next, the last to the client."""
    stops = ["client", *range(servers), "client"]
    one = states_bytes(1)
    rate = lambda x: profile.client_mbps if x == "client" else profile.mbps_of(x)
    hops = sum(profile.one_way(a, b) + bytes_ms(one, min(rate(a), rate(b))) for a, b in zip(stops, stops[1:]))
    return hops + BLOCKS * DEVICES[device]["step_us"] / 1e3


def prefill_ms(profile, servers, tokens):
    """Milliseconds that the client's line takes for a prefix, of which every server gets a copy."""
    return servers * bytes_ms(states_bytes(tokens), profile.client_mbps)


def pass_floor(profile, servers, device, batch, tokens, up, passes):
    """Milliseconds of a pass through all servers, one after the other, each asked by the client with `up` tensors and answering with one;
    `passes` is the work of a token in forward passes. Pieces of a batch overlap: the slowest of the client's lines and of the servers'
    devices is what each further piece costs."""
    rows = max(1, CHUNK_TOKENS // tokens)
    chunks = math.ceil(batch / rows)
    piece = states_bytes(min(batch, rows) * tokens)
    of = DEVICES[device]
    compute = lambda blocks: blocks * passes * max(min(batch, rows) * tokens * of["token_us"], of["step_us"]) / 1e3
    first = sum(2 * profile.one_way("client", i) + (up + 1) * bytes_ms(piece, min(profile.client_mbps, profile.mbps_of(i)))
                for i in range(servers)) + compute(BLOCKS)
    line = servers * max(up, 1) * bytes_ms(piece, profile.client_mbps)
    slowest = max(compute(end - start) for start, end in spans(servers))
    return first + (chunks - 1) * max(line, slowest)


def forward_floor(profile, servers, device, batch, tokens):
    return pass_floor(profile, servers, device, batch, tokens, up=1, passes=1)


def training_floor(profile, servers, device, batch, tokens):
    """A forward pass and then gradients: inputs and their gradients go there; forward and gradient take three passes."""
    return (forward_floor(profile, servers, device, batch, tokens)
            + pass_floor(profile, servers, device, batch, tokens, up=2, passes=3))
