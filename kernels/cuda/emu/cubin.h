// Reads from a cubin what limits the launches of its kernels.
// Source: the ELF-64 format; sections and attributes as `readelf` and cuobjdump show them
// (.text.NAME, .nv.shared.NAME, .nv.info, .nv.info.NAME).
#pragma once
#include <stdint.h>
#include <string.h>

#include <map>
#include <string>
#include <vector>

namespace emu {

struct KernelInfo {
    unsigned registers = 0, static_shared = 0, max_threads = 1024, params = 0;
    unsigned cluster[3] = {1, 1, 1};
};

class Cubin {
public:
    std::map<std::string, KernelInfo> kernels;
    // Compute capability times ten.
    unsigned architecture = 0;

    // False when the bytes are no cubin. Their number is not known to the driver, so offsets are
    // believed: images are our own.
    bool read(const unsigned char* bytes) {
        at = bytes;
        if (memcmp(bytes,
                   "\x7f"
                   "ELF",
                   4) ||
            number<uint16_t>(18) != EM_CUDA)
            return false;
        // The second byte in the format of CUDA 12.8 and later (ABI version 8), else the first.
        uint32_t flags = number<uint32_t>(48);
        architecture = (bytes[8] >= 8 ? flags >> 8 : flags) & 0xff;
        list_sections();
        for (auto& section : sections) {
            if (section.name.rfind(".text.", 0) == 0) kernels[section.name.substr(6)];
        }
        for (auto& section : sections) {
            if (section.name == ".nv.info") registers_of(section);
            auto kernel = kernels.find(after(section.name, ".nv.info."));
            if (kernel != kernels.end()) limits_of(section, kernel->second);
            kernel = kernels.find(after(section.name, ".nv.shared."));
            // From 9.0 on its first 1,024 bytes are the system's, which no limit counts.
            const uint64_t reserved = architecture >= 90 ? 1024 : 0;
            if (kernel != kernels.end() && section.bytes > reserved)
                kernel->second.static_shared = (unsigned)(section.bytes - reserved);
        }
        return true;
    }

private:
    static constexpr unsigned EM_CUDA = 190;
    // Attributes of .nv.info, and the form of one that has a payload.
    static constexpr unsigned MAX_THREADS = 0x05, PARAM = 0x17, REGISTERS = 0x2f, CLUSTER = 0x3d,
                              WITH_PAYLOAD = 4;

    struct Section {
        std::string name;
        uint64_t start, bytes;
        uint32_t type;
    };
    const unsigned char* at = nullptr;
    std::vector<Section> sections;

    template <class T> T number(uint64_t offset) const {
        T value;
        memcpy(&value, at + offset, sizeof value);
        return value;
    }

    static std::string after(const std::string& name, const char* prefix) {
        return name.rfind(prefix, 0) == 0 ? name.substr(strlen(prefix)) : std::string();
    }

    void list_sections() {
        uint64_t table = number<uint64_t>(40);
        unsigned size = number<uint16_t>(58), count = number<uint16_t>(60),
                 names = number<uint16_t>(62);
        uint64_t name_bytes = number<uint64_t>(table + names * size + 24);
        for (unsigned i = 0; i < count; i++) {
            uint64_t header = table + i * size;
            const char* name =
                reinterpret_cast<const char*>(at + name_bytes + number<uint32_t>(header));
            sections.push_back({name, number<uint64_t>(header + 24), number<uint64_t>(header + 32),
                                number<uint32_t>(header + 4)});
        }
    }

    template <class F> void attributes(const Section& section, F each) const {
        for (uint64_t here = section.start, end = here + section.bytes; here + 4 <= end;) {
            unsigned form = at[here], attribute = at[here + 1], size = number<uint16_t>(here + 2);
            bool has_payload = form == WITH_PAYLOAD;
            if (has_payload) each(attribute, here + 4);
            here += 4 + (has_payload ? size : 0);
        }
    }

    void registers_of(const Section& info) {
        const Section *symbols = nullptr, *names = nullptr;
        for (auto& section : sections) {
            if (section.name == ".symtab") symbols = &section;
            if (section.name == ".strtab") names = &section;
        }
        if (!symbols || !names) return;
        attributes(info, [&](unsigned attribute, uint64_t payload) {
            if (attribute != REGISTERS) return;
            uint64_t symbol = symbols->start + 24ull * number<uint32_t>(payload);
            auto kernel = kernels.find(
                reinterpret_cast<const char*>(at + names->start + number<uint32_t>(symbol)));
            if (kernel != kernels.end()) kernel->second.registers = number<uint32_t>(payload + 4);
        });
    }

    void limits_of(const Section& info, KernelInfo& kernel) const {
        attributes(info, [&](unsigned attribute, uint64_t payload) {
            if (attribute == MAX_THREADS) {
                kernel.max_threads = number<uint32_t>(payload) * number<uint32_t>(payload + 4) *
                                     number<uint32_t>(payload + 8);
            } else if (attribute == PARAM) {
                kernel.params++;
            } else if (attribute == CLUSTER) {
                for (unsigned i = 0; i < 3; i++)
                    kernel.cluster[i] = number<uint32_t>(payload + 4 * i);
            }
        });
    }
};

} // namespace emu
