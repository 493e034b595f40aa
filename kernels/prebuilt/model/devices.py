"""The devices for which times are computed.

Bandwidth, multiprocessors, clocks and caches are those of NVIDIA's data sheets and whitepapers
(A100, H100, GA102, Ada, Blackwell RTX; H200, L4, L40S and B200: data sheets). What is assumed:

- `share`: the part of the bandwidth that a long copy reaches: 0.90 of HBM, 0.92 of GDDR6X, 0.90 of
  GDDR7, 0.88 of GDDR6 with error correction and of the RTX 3060
- `clock`: the clock under load; the boost clock, but 1,755 MHz for H100 and H200 (boost 1,980),
  1,750 MHz for B200 (1,965) and 1,500 MHz for L4 (2,040), whose power is limited
- `l2_bytes`: bytes per clock from the second-level cache to all multiprocessors: three quarters of
  64 per slice; A100, H100 and H200 have 80 slices, others 4 per 32 bits of two memory channels
- `tensor_rate`: products of 16-bit numbers with f32 sums per clock and multiprocessor by mma.sync.
  GeForce sums f32 at half rate. On Hopper and B200 mma.sync is taken as A100's 1,024; arXiv
  2402.13499 measured 62 % of the peak of wgmma, which is 1,280
- `l2_latency`, `memory_latency`: clocks (arXiv 2402.13499 and 2208.11174: 200 to 280 for L2 hits)
"""

import dataclasses

# Bytes of the second-level cache per clock that one multiprocessor takes.
L2_PORT = 64.0


@dataclasses.dataclass(frozen=True)
class Device:
    name: str
    architecture: str  # of the cubin that runs on it
    multiprocessors: int
    boost: float  # MHz
    clock: float  # MHz under load
    bandwidth: float  # GB/s, as specified
    share: float  # of it that is reached
    shared: int  # KiB of shared memory of a multiprocessor
    shared_cta: int  # KiB that a CTA may use
    l2: int  # MiB
    l2_bytes: int  # per clock
    load_store_units: int  # of a multiprocessor
    tensor_rate: int
    warps: int  # that a multiprocessor holds
    ctas: int
    l2_latency: int = 270
    memory_latency: float = 0.7  # us

    @property
    def reached(self):
        """Bytes per second."""
        return self.bandwidth * self.share * 1e9

    @property
    def hertz(self):
        return self.clock * 1e6

    @property
    def bytes_per_clock(self):
        """Bytes of memory per clock and multiprocessor."""
        return self.reached / self.hertz / self.multiprocessors

    @property
    def l2_bytes_per_clock(self):
        """Bytes of the second-level cache per clock and multiprocessor, if all read."""
        return min(L2_PORT, self.l2_bytes / self.multiprocessors)


#       name  arch  SMs  boost clock GB/s  share  KiB KiB  L2 L2 B/clk  LSU mma  warps CTAs
TABLE = [
    ("A100", "80", 108, 1410, 1410, 2039, 0.90, 164, 163, 40, 3840, 32, 1024, 64, 32),
    ("RTX 3060", "86", 28, 1777, 1777, 360, 0.88, 100, 99, 3, 1152, 16, 256, 48, 16),
    ("RTX 3090", "86", 82, 1695, 1695, 936, 0.92, 100, 99, 6, 2304, 16, 256, 48, 16),
    ("RTX 4090", "89", 128, 2520, 2520, 1008, 0.92, 100, 99, 72, 2304, 16, 256, 48, 24),
    ("RTX 5090", "120", 170, 2407, 2407, 1792, 0.90, 100, 99, 96, 3072, 16, 256, 48, 24),
    ("L4", "89", 58, 2040, 1500, 300, 0.88, 100, 99, 48, 1152, 16, 512, 48, 24),
    ("L40S", "89", 142, 2520, 2520, 864, 0.88, 100, 99, 96, 2304, 16, 512, 48, 24),
    ("H100", "90a", 132, 1980, 1755, 3350, 0.90, 228, 227, 50, 3840, 32, 1024, 64, 32),
    ("H200", "90a", 132, 1980, 1755, 4800, 0.90, 228, 227, 50, 3840, 32, 1024, 64, 32),
    ("B200", "100", 148, 1965, 1750, 8000, 0.90, 228, 227, 126, 7680, 32, 1024, 64, 32),
]
DEVICES = {row[0]: Device(*row) for row in TABLE}
# Computed and printed, but held to no limit.
UNCHECKED = {"B200"}
