"""A launch of a kernel as the kernel sees it: grid, parameters, special memory."""

import dataclasses
import struct

from .memory import BUFFER_SHIFT

# Where constant bank 0 has the parameters, the sizes of a CTA and those of the grid.
LAYOUTS = {
    "80": (0x160, 0x0, 0xC),
    "86": (0x160, 0x0, 0xC),
    "89": (0x160, 0x0, 0xC),
    "90a": (0x210, 0x0, 0xC),
    "100": (0x380, 0x360, 0x370),
    "120": (0x380, 0x360, 0x370),
}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A pointer parameter: `words` is what is known of its content."""

    name: str
    words: tuple = ()
    # Whether it comes from the device's memory rather than the second-level cache.
    is_streamed: bool = False


@dataclasses.dataclass(frozen=True)
class Wide:
    """A 64-bit number."""

    value: int


class Launch:
    """Constants and memory of a launch on an architecture.

    Parameters are `Buffer`, `Wide`, int (32 bits), float, or None for a null pointer.
    """

    def __init__(self, architecture, grid, cta, parameters, constants):
        parameter_at, cta_at, grid_at = LAYOUTS[architecture]
        self.words, self.buffers, self.constants = {}, [], constants
        self.cta = cta
        for base, sizes in ((cta_at, cta), (grid_at, grid)):
            for axis, size in enumerate(sizes):
                self.words[base + 4 * axis] = size
        at = parameter_at
        for parameter in parameters:
            size, value = self.encoded(parameter)
            at = (at + size - 1) // size * size
            for part in range(size // 4):
                self.words[at + 4 * part] = value >> (32 * part) & 0xFFFFFFFF
            at += size
        declared = len(constants.get(0, b""))
        if declared and declared != at:
            raise ValueError(
                f"{at - parameter_at} bytes of parameters, the kernel declares"
                f" {declared - parameter_at}: change model/shapes.py as the backend launches it"
            )

    def encoded(self, parameter):
        """Bytes and bits of a parameter; buffers get addresses far apart."""
        if parameter is None:
            return 8, 0
        if isinstance(parameter, Buffer):
            self.buffers.append(parameter)
            return 8, len(self.buffers) << BUFFER_SHIFT
        if isinstance(parameter, Wide):
            return 8, parameter.value
        if isinstance(parameter, float):
            return 4, struct.unpack("<I", struct.pack("<f", parameter))[0]
        return 4, parameter

    def constant(self, bank, offset):
        """A word of a constant bank, or None."""
        if bank == 0:
            return self.words.get(offset, 0 if offset < 0x40 else None)
        if bank == 4:
            # Addresses of tables in global memory.
            return 0x100 + offset // 8 if offset % 8 else 0
        data = self.constants.get(bank, b"")
        return struct.unpack_from("<I", data, offset)[0] if offset + 4 <= len(data) else None

    def word(self, address):
        """A word of global memory, or None."""
        buffer = self.buffer(address >> BUFFER_SHIFT)
        at = (address & (1 << BUFFER_SHIFT) - 1) // 4
        return buffer.words[at] if buffer and at < len(buffer.words) else None

    def streamed(self):
        """The numbers of the buffers that come from the device's memory."""
        return {at for at, buffer in enumerate(self.buffers, 1) if buffer.is_streamed}

    def buffer(self, number):
        return self.buffers[number - 1] if 0 < number <= len(self.buffers) else None
