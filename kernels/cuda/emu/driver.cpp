// A libcuda.so whose devices are the emulator, so that everything above the driver's functions runs
// as on a GPU: the probe, the loader of images, streams, events, graphs, registered memory. It is
// stricter than a driver, and as late as one may be:
//
//   - Enqueued work runs when a thread waits for it or asks whether it is done, not before: a host
//     that reads or overwrites too early gets wrong numbers. Copies from pinned or registered
//     memory read it then; other host memory is read at the call.
//   - Each copy and fill must be inside memory that is allocated, pinned or registered; otherwise
//     it is error 700, as on a GPU.
//   - A kernel needs a loaded image that contains it. A launch must respect the compiled kernel:
//     parameters, threads, clusters, registers, static and dynamic shared memory.
//   - Launches that may start early (programmatic stream serialization) are checked as fiber.h
//     says, by their state before the launch that the run of them follows.
//   - A thread that records may not allocate, free, wait, or copy from pageable memory: such a call
//     fails and invalidates the recording.
//   - Memory for other processes is a memfd. It is mapped in whole granules and reached after
//     cuMemSetAccess, which fails for memory of a device that this one does not reach. A descriptor
//     of anything else, of another size, or of a process that has ended is refused.
//   - An error from 700 on is sticky: every later call reports it.
//
// Settings from the environment:
//   EMU_CUDA_ARCH (90), EMU_CUDA_DEVICES (1), EMU_CUDA_MEMORY (bytes of each device, 8 GiB)
//   EMU_CUDA_PEERS (1)               0: devices do not reach each other's memory
//   EMU_CUDA_SHARING (1)             0: memory cannot be exported as a descriptor
//   EMU_CUDA_VERSION (12040)         the version of CUDA that the driver supports
//   EMU_CUDA_FAIL=CALL:ERROR:AFTER   the call of that name fails after AFTER successes; may be a
//                                    list with commas
//   EMU_CUDA_FAIL_ONCE=FILE          it fails in the one process that creates the file
//   EMU_CUDA_FAIL_FOLDER=FOLDER      a call with a file of its name in FOLDER removes it and fails
//                                    with the error that is in it
//   EMU_CUDA_REGISTER=BYTES          larger pieces of host memory are not registered
//   EMU_CUDA_FAULTY=NAME:ERROR       each kernel whose name contains NAME ends with that error
//   EMU_CUDA_FAULTY=NAME:hang        each such kernel never ends
// Source of the rules: CUDA Driver API reference; CUDA C++ programming guide, "Stream capture" and
// "Prohibited and unhandled operations".
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "cubin.h"
#include "fiber.h"

namespace emu {
extern const Table* const tables[];
extern const unsigned table_count;
} // namespace emu

namespace {

enum : int {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    OUT_OF_RESOURCES = 701,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    INVALID_CLUSTER_SIZE = 912,
};

// Enqueued work. A launch that may start early has `rehearse`; a kernel that other launches may
// start before the end of is a launch.
struct Command {
    std::function<int(uint64_t)> run;
    std::function<uint64_t()> rehearse;
    bool is_launch = false;
    uint64_t state = 0; // what `rehearse` gave before the launches that it may overlap
    Command() = default;
    template <class F> Command(F work) : run([=](uint64_t) { return work(); }) {}
};
struct Device {
    int references = 0;
    uint64_t taken = 0;
    std::map<uint64_t, uint64_t> memory; // address: bytes
};
struct Stream {
    Device* device;
    std::deque<Command> waiting;
    bool records = false, is_spoilt = false;
    std::thread::id recorder;
    std::vector<Command> recorded;
};
struct Event {
    Stream* stream = nullptr;
    bool is_done = false;
    double seconds = 0;
};
struct Function {
    const emu::Kernel* kernel;
    emu::KernelInfo info;
    unsigned most_dynamic = 48 * 1024;
    int carveout = -1; // percent of the largest shared memory, or the driver's choice
};
struct Module {
    std::map<std::string, std::unique_ptr<Function>> functions;
};
typedef std::vector<Command> Graph;

std::recursive_mutex lock;
bool is_started;
int broken; // the error that stays
thread_local Device* current;
std::vector<Device> devices;
std::vector<Stream*> streams;
std::map<uint64_t, uint64_t> host; // pinned and registered ranges

// Memory that can be exported, by its handle, and reserved addresses with what is mapped there.
struct Allocation {
    int descriptor;
    int device;
    uint64_t bytes;
    bool is_own; // this process made it
};
struct Range {
    uint64_t bytes;
    bool is_mapped = false, is_own = false;
    int device = -1;
};
std::map<uint64_t, Allocation> allocations;
std::map<uint64_t, Range> reserved;
uint64_t last_handle;
const uint64_t GRANULARITY = 65536;
const uint64_t VERSION = 12040;

uint64_t setting(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}
unsigned architecture() { return (unsigned)setting("EMU_CUDA_ARCH", 90); }
// What a CTA may have: 163, 99, 227 KiB.
unsigned shared_bytes() {
    unsigned of = architecture();
    return (of == 80 ? 163 : of == 90 || of == 100 ? 227 : 99) * 1024;
}

// Whether there is a file for this call, and the error in it. Of those that read it, one removes it
// and fails.
int failure_by_file(const char* call) {
    static const char* folder = getenv("EMU_CUDA_FAIL_FOLDER");
    if (!folder) return OK;
    const std::string path = std::string(folder) + "/" + call;
    FILE* file = fopen(path.c_str(), "r");
    if (!file) return OK;
    char text[16] = {};
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    return length && !unlink(path.c_str()) ? atoi(text) : OK;
}

struct Plan {
    std::string call;
    int error;
    uint64_t after, calls;
};
std::vector<Plan> read_plans() {
    std::vector<Plan> plans;
    for (const char* at = getenv("EMU_CUDA_FAIL"); at && *at;) {
        const char* colon = strchr(at, ':');
        if (!colon) break;
        char* rest;
        int error = (int)strtol(colon + 1, &rest, 10);
        uint64_t after = *rest == ':' ? strtoull(rest + 1, &rest, 10) : 0;
        plans.push_back({std::string(at, colon), error, after, 0});
        at = *rest == ',' ? rest + 1 : nullptr;
    }
    return plans;
}

// Whether this call is one that the settings have fail, and its error.
int planned_failure(const char* call) {
    if (int error = failure_by_file(call)) return error;
    static std::vector<Plan> plans = read_plans();
    for (Plan& plan : plans) {
        if (plan.call != call || plan.calls++ != plan.after) continue;
        if (const char* file = getenv("EMU_CUDA_FAIL_ONCE")) {
            int made = open(file, O_CREAT | O_EXCL | O_WRONLY, 0600);
            if (made < 0) return OK;
            close(made);
        }
        return plan.error;
    }
    return OK;
}

// How EMU_CUDA_FAULTY has this kernel end.
int planned_fault(const char* kernel) {
    static const char* plan = getenv("EMU_CUDA_FAULTY");
    const char* colon = plan ? strchr(plan, ':') : nullptr;
    if (!colon || !strstr(kernel, std::string(plan, colon).c_str())) return OK;
    while (!strcmp(colon + 1, "hang")) pause();
    return atoi(colon + 1);
}

int kept(int error) {
    if (error >= 700 && error < 900) broken = error;
    return error;
}

// What every call begins with.
int begin(const char* call, bool needs_context) {
    if (!is_started) return NOT_INITIALIZED;
    if (broken) return broken;
    if (needs_context && (!current || !current->references)) return INVALID_CONTEXT;
    return kept(planned_failure(call));
}
#define BEGIN(needs_context)                                                                       \
    std::lock_guard<std::recursive_mutex> guard(lock);                                             \
    if (int error = begin(__func__, needs_context)) return error

// Refuses what may not be done by a thread that records.
int outside_recordings() {
    for (auto* stream : streams)
        if (stream->records && stream->recorder == std::this_thread::get_id()) {
            stream->is_spoilt = true;
            return CAPTURE_UNSUPPORTED;
        }
    return OK;
}
#define OUTSIDE_RECORDINGS()                                                                       \
    if (int error = outside_recordings()) return error

bool lies_in(const std::map<uint64_t, uint64_t>& ranges, uint64_t at, uint64_t bytes) {
    auto next = ranges.upper_bound(at);
    if (next == ranges.begin()) return false;
    --next;
    return at - next->first <= next->second && bytes <= next->second - (at - next->first);
}
bool is_host(const void* at, uint64_t bytes) { return lies_in(host, (uint64_t)at, bytes); }
bool is_reachable(Device* device, uint64_t at, uint64_t bytes) {
    return lies_in(device->memory, at, bytes) || lies_in(host, at, bytes);
}
template <class T> T* pointer(uint64_t at) { return reinterpret_cast<T*>(at); }

int enqueue(Stream* stream, Command command) {
    if (!stream || stream->device != current) return INVALID_HANDLE;
    if (stream->records)
        stream->recorded.push_back(std::move(command));
    else
        stream->waiting.push_back(std::move(command));
    return OK;
}

// Runs what waits until `done`.
template <class F> int run_until(Stream* stream, F done) {
    while (!stream->waiting.empty() && !done()) {
        Command command = std::move(stream->waiting.front());
        stream->waiting.pop_front();
        if (command.is_launch && !command.rehearse)
            for (auto& next : stream->waiting) {
                if (!next.rehearse) break;
                if (!next.state) next.state = next.rehearse();
            }
        if (int error = command.run(command.state)) return broken = error;
    }
    return OK;
}
int run_all(Stream* stream) {
    return run_until(stream, [] { return false; });
}

// Whether work has been asked for that a thread of its own runs now: a kernel may wait for other
// processes meanwhile, and whoever asked goes on.
std::atomic<bool> runs_beside;
template <class F> int ask(Stream* stream, F done) {
    if (stream->waiting.empty() || done()) return OK;
    runs_beside = true;
    std::thread([=] {
        std::lock_guard<std::recursive_mutex> guard(lock);
        run_until(stream, done);
        runs_beside = false;
    }).detach();
    return NOT_READY;
}
int run_everything() {
    for (auto* stream : streams)
        if (int error = run_all(stream)) return error;
    return OK;
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

uint64_t map_memory(uint64_t bytes) {
    void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return 0;
    memset(start, 0xff, bytes); // NaN
    return (uint64_t)start;
}

const emu::Kernel* emulated(const char* name) {
    for (unsigned t = 0; t < emu::table_count; t++)
        for (unsigned k = 0; k < emu::tables[t]->count; k++)
            if (!strcmp(emu::tables[t]->kernels[k].name, name)) return &emu::tables[t]->kernels[k];
    return nullptr;
}

int complain(const char* name, const char* what) {
    fprintf(stderr, "emulated driver: %s: %s\n", name, what);
    return INVALID_VALUE;
}

// CTAs of a launch that a multiprocessor holds with this much shared memory, of which each takes a
// KiB for itself.
unsigned resident(const Function& function, unsigned threads, unsigned dynamic, unsigned shared) {
    unsigned warps = (threads + 31) / 32,
             registers = warps * ((function.info.registers * 32 + 255) / 256 * 256),
             by_registers = registers ? 65536 / registers : 64,
             by_shared = shared / (dynamic + function.info.static_shared + 1024);
    return std::min(std::min(by_registers, 64 / warps), std::min(by_shared, 16u));
}

// Whether a card could run the launch.
int check_launch(const Function& function, const unsigned (&grid)[3], const unsigned (&cta)[3],
                 unsigned dynamic) {
    const char* name = function.kernel->name;
    unsigned threads = cta[0] * cta[1] * cta[2], warps = (threads + 31) / 32;
    if (function.info.params != function.kernel->count)
        return complain(name, "the image was compiled with other parameters");
    const unsigned (&cluster)[3] = function.info.cluster;
    if (memcmp(cluster, function.kernel->cluster, sizeof cluster))
        return complain(name, "the image was compiled with other clusters");
    for (unsigned i = 0; i < 3; i++)
        if (grid[i] % cluster[i]) {
            complain(name, "a grid that its clusters do not fill");
            return INVALID_CLUSTER_SIZE;
        }
    if (threads > function.info.max_threads)
        return complain(name, "more threads than __launch_bounds__ allows");
    if (dynamic > function.most_dynamic)
        return complain(name, "more dynamic shared memory than the function may have");
    if (dynamic + function.info.static_shared > shared_bytes())
        return complain(name, "more shared memory than a CTA has");
    // A multiprocessor has a KiB more than a CTA may have. Without a preference that a card must
    // follow, it may give just what one CTA needs.
    unsigned most = shared_bytes() + 1024, one = dynamic + function.info.static_shared + 1024,
             preferred = function.carveout < 0 ? 0 : most / 100 * (unsigned)function.carveout;
    if (function.carveout != 100 && resident(function, threads, dynamic, std::max(preferred, one)) <
                                        resident(function, threads, dynamic, most))
        return complain(name, "fewer CTAs than fit, for want of a shared memory carveout");
    // A warp takes registers in pieces of 256.
    if (warps * ((function.info.registers * 32 + 255) / 256 * 256) > 65536) {
        complain(name, "more registers than a multiprocessor has");
        return OUT_OF_RESOURCES;
    }
    return OK;
}

} // namespace

#define API extern "C" __attribute__((visibility("default"))) int

// --- start, devices, contexts --------------------------------------------------------------------

extern "C" const char* sepal_emu_lacks(); // processor.cpp

API cuInit(unsigned) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (const char* lacking = sepal_emu_lacks()) {
        fprintf(stderr, "cuda emulator: compiled for a processor with %s, which this one lacks\n",
                lacking);
        abort();
    }
    if (int error = planned_failure("cuInit")) return error;
    if (!is_started) devices.resize(setting("EMU_CUDA_DEVICES", 1));
    is_started = true;
    return OK;
}
API cuDriverGetVersion(int* version) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (int error = planned_failure("cuDriverGetVersion")) return error;
    *version = (int)setting("EMU_CUDA_VERSION", VERSION);
    return OK;
}
API cuDeviceGetCount(int* count) {
    BEGIN(false);
    *count = (int)devices.size();
    return OK;
}
API cuDeviceGet(int* device, int ordinal) {
    BEGIN(false);
    if (ordinal < 0 || (size_t)ordinal >= devices.size()) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}
API cuDeviceGetName(char* name, int bytes, int) {
    BEGIN(false);
    snprintf(name, (size_t)bytes, "emulator behind a driver");
    return OK;
}
API cuDeviceGetUuid_v2(void* uuid, int device) {
    BEGIN(false);
    char text[17];
    snprintf(text, sizeof text, "emulated card %2u", (unsigned)device % 100);
    memcpy(uuid, text, 16);
    return OK;
}
API cuDeviceGetAttribute(int* value, int which, int) {
    BEGIN(false);
    switch (which) {
        case 16: // MULTIPROCESSOR_COUNT
            *value = 4;
            return OK;
        case 75: // COMPUTE_CAPABILITY_MAJOR
            *value = (int)(architecture() / 10);
            return OK;
        case 76: // COMPUTE_CAPABILITY_MINOR
            *value = (int)(architecture() % 10);
            return OK;
        case 97: // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            *value = (int)shared_bytes();
            return OK;
        case 102: // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        case 103: // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            *value = (int)setting("EMU_CUDA_SHARING", 1);
            return OK;
        default:
            complain("cuDeviceGetAttribute", "an attribute that is not emulated");
            return INVALID_VALUE;
    }
}
API cuDevicePrimaryCtxRetain(void** context, int device) {
    BEGIN(false);
    if (device < 0 || (size_t)device >= devices.size()) return INVALID_DEVICE;
    devices[(size_t)device].references++;
    *context = &devices[(size_t)device];
    return OK;
}
API cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN(false);
    if (device < 0 || (size_t)device >= devices.size() || !devices[(size_t)device].references)
        return INVALID_CONTEXT;
    devices[(size_t)device].references--;
    return OK;
}
API cuCtxSetCurrent(void* context) {
    BEGIN(false);
    current = static_cast<Device*>(context);
    return OK;
}

// --- memory --------------------------------------------------------------------------------------

API cuMemGetInfo_v2(size_t* free, size_t* total) {
    BEGIN(true);
    *total = setting("EMU_CUDA_MEMORY", 8ull << 30);
    *free = *total - current->taken;
    return OK;
}
API cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    if (!bytes) return INVALID_VALUE;
    if (bytes > setting("EMU_CUDA_MEMORY", 8ull << 30) - current->taken ||
        !(*address = map_memory(bytes)))
        return OUT_OF_MEMORY;
    current->taken += bytes;
    current->memory[*address] = bytes;
    return OK;
}
API cuMemFree_v2(uint64_t address) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    auto found = current->memory.find(address);
    if (found == current->memory.end()) return INVALID_VALUE;
    if (int error = run_everything()) return error;
    munmap(pointer<void>(address), found->second);
    current->taken -= found->second;
    current->memory.erase(found);
    return OK;
}
API cuMemHostAlloc(void** start, size_t bytes, unsigned) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    uint64_t at = bytes ? map_memory(bytes) : 0;
    if (!at) return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
    host[at] = bytes;
    *start = pointer<void>(at);
    return OK;
}
API cuMemFreeHost(void* start) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    auto found = host.find((uint64_t)start);
    if (found == host.end()) return INVALID_VALUE;
    if (int error = run_everything()) return error;
    munmap(start, found->second);
    host.erase(found);
    return OK;
}
API cuMemHostRegister_v2(void* start, size_t bytes, unsigned) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    if (!start || !bytes) return INVALID_VALUE;
    if (bytes > setting("EMU_CUDA_REGISTER", ~0ull)) return OUT_OF_MEMORY;
    auto next = host.upper_bound((uint64_t)start + bytes - 1);
    if (next != host.begin()) {
        --next;
        if (next->first + next->second > (uint64_t)start) return ALREADY_REGISTERED;
    }
    host[(uint64_t)start] = bytes;
    return OK;
}
API cuMemHostUnregister(void* start) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    auto found = host.find((uint64_t)start);
    if (found == host.end()) return NOT_REGISTERED;
    if (int error = run_everything()) return error;
    host.erase(found);
    return OK;
}
API cuMemHostGetDevicePointer_v2(uint64_t* address, void* start, unsigned) {
    BEGIN(true);
    if (!is_host(start, 1)) return INVALID_VALUE;
    *address = (uint64_t)start;
    return OK;
}

// --- memory of several processes -----------------------------------------------------------------

// The head of CUmemAllocationProp, and CUmemAccessDesc.
struct Properties {
    int type, handle_types, location_type, device;
};
struct Access {
    int location_type, device, flags;
};
enum { PINNED = 1, ON_DEVICE = 1, READWRITE = 3, AS_DESCRIPTOR = 1 };

API cuDeviceCanAccessPeer(int* can, int device, int peer) {
    BEGIN(false);
    int count = (int)devices.size();
    if (device < 0 || device >= count || peer < 0 || peer >= count) return INVALID_DEVICE;
    *can = device != peer && setting("EMU_CUDA_PEERS", 1);
    return OK;
}
API cuMemGetAllocationGranularity(size_t* bytes, const Properties* of, int) {
    BEGIN(false);
    if (of->type != PINNED || of->location_type != ON_DEVICE) return INVALID_VALUE;
    *bytes = GRANULARITY;
    return OK;
}
API cuMemCreate(uint64_t* handle, size_t bytes, const Properties* of, unsigned long long flags) {
    BEGIN(false);
    if (of->type != PINNED || of->location_type != ON_DEVICE || flags) return INVALID_VALUE;
    if (of->device < 0 || (size_t)of->device >= devices.size()) return INVALID_DEVICE;
    if (!bytes || bytes % GRANULARITY) return INVALID_VALUE;
    if (of->handle_types & AS_DESCRIPTOR && !setting("EMU_CUDA_SHARING", 1)) return NOT_SUPPORTED;
    Device& device = devices[(size_t)of->device];
    if (bytes > setting("EMU_CUDA_MEMORY", 8ull << 30) - device.taken) return OUT_OF_MEMORY;
    char name[64];
    snprintf(name, sizeof name, "emulated memory of device %d of process %d", of->device, getpid());
    int descriptor = memfd_create(name, MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, (off_t)bytes)) return OUT_OF_MEMORY;
    device.taken += bytes;
    allocations[*handle = ++last_handle] = {descriptor, of->device, bytes, true};
    return OK;
}
API cuMemRelease(uint64_t handle) {
    BEGIN(false);
    auto found = allocations.find(handle);
    if (found == allocations.end()) return INVALID_VALUE;
    close(found->second.descriptor);
    allocations.erase(found);
    return OK;
}
API cuMemExportToShareableHandle(void* descriptor, uint64_t handle, int type,
                                 unsigned long long flags) {
    BEGIN(false);
    auto found = allocations.find(handle);
    if (found == allocations.end() || type != AS_DESCRIPTOR || flags) return INVALID_VALUE;
    int copy = fcntl(found->second.descriptor, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) return INVALID_VALUE;
    memcpy(descriptor, &copy, sizeof copy);
    return OK;
}
API cuMemImportFromShareableHandle(uint64_t* handle, void* descriptor, int type) {
    BEGIN(false);
    if (type != AS_DESCRIPTOR) return INVALID_VALUE;
    int copy = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) return INVALID_VALUE;
    char path[64], name[128];
    snprintf(path, sizeof path, "/proc/self/fd/%d", copy);
    ssize_t length = readlink(path, name, sizeof name - 1);
    name[length < 0 ? 0 : length] = 0;
    struct stat size;
    int device, process;
    if (sscanf(name, "/memfd:emulated memory of device %d of process %d", &device, &process) != 2 ||
        fstat(copy, &size) || kill(process, 0)) {
        close(copy);
        return complain("cuMemImportFromShareableHandle",
                        "not memory of a device of a process that runs");
    }
    allocations[*handle = ++last_handle] = {copy, device, (uint64_t)size.st_size, false};
    return OK;
}
API cuMemAddressReserve(uint64_t* at, size_t bytes, size_t, uint64_t, unsigned long long) {
    BEGIN(false);
    if (!bytes || bytes % GRANULARITY) return INVALID_VALUE;
    void* start =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    reserved[*at = (uint64_t)start] = Range{bytes};
    return OK;
}
API cuMemAddressFree(uint64_t at, size_t bytes) {
    BEGIN(false);
    auto found = reserved.find(at);
    if (found == reserved.end() || found->second.bytes != bytes || found->second.is_mapped)
        return INVALID_VALUE;
    munmap(pointer<void>(at), bytes);
    reserved.erase(found);
    return OK;
}
API cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    BEGIN(false);
    auto range = reserved.find(at);
    auto found = allocations.find(handle);
    if (range == reserved.end() || found == allocations.end() || range->second.is_mapped ||
        range->second.bytes != bytes || found->second.bytes != bytes || offset || flags)
        return INVALID_VALUE;
    const Allocation& memory = found->second;
    if (mmap(pointer<void>(at), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             memory.descriptor, 0) == MAP_FAILED)
        return OUT_OF_MEMORY;
    range->second.is_mapped = true;
    range->second.is_own = memory.is_own;
    range->second.device = memory.device;
    return OK;
}
API cuMemSetAccess(uint64_t at, size_t bytes, const Access* access, size_t count) {
    BEGIN(true);
    auto range = reserved.find(at);
    if (range == reserved.end() || !range->second.is_mapped || range->second.bytes != bytes ||
        count != 1 || access->location_type != ON_DEVICE || access->flags != READWRITE)
        return INVALID_VALUE;
    if (access->device < 0 || (size_t)access->device >= devices.size() ||
        (access->device != range->second.device && !setting("EMU_CUDA_PEERS", 1)))
        return INVALID_DEVICE;
    devices[(size_t)access->device].memory[at] = bytes;
    return OK;
}
API cuMemUnmap(uint64_t at, size_t bytes) {
    BEGIN(false);
    auto range = reserved.find(at);
    if (range == reserved.end() || !range->second.is_mapped || range->second.bytes != bytes)
        return INVALID_VALUE;
    if (int error = run_everything()) return error;
    mmap(pointer<void>(at), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (auto& device : devices) device.memory.erase(at);
    if (range->second.is_own) devices[(size_t)range->second.device].taken -= bytes;
    range->second = Range{bytes};
    return OK;
}

// --- copies and fills ----------------------------------------------------------------------------

API cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    BEGIN(true);
    Device* device = current;
    return enqueue(static_cast<Stream*>(stream), [=] {
        if (!is_reachable(device, to, bytes) || !is_reachable(device, from, bytes))
            return (int)ILLEGAL_ADDRESS;
        memmove(pointer<void>(to), pointer<void>(from), bytes);
        return (int)OK;
    });
}
API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    BEGIN(true);
    if (is_host(from, bytes)) return cuMemcpyAsync(to, (uint64_t)from, bytes, stream);
    OUTSIDE_RECORDINGS();
    Device* device = current;
    const char* first = static_cast<const char*>(from);
    std::vector<char> copy(first, first + bytes);
    return enqueue(static_cast<Stream*>(stream), [=] {
        if (!is_reachable(device, to, bytes)) return (int)ILLEGAL_ADDRESS;
        memcpy(pointer<void>(to), copy.data(), bytes);
        return (int)OK;
    });
}
API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    BEGIN(true);
    if (is_host(to, bytes)) return cuMemcpyAsync((uint64_t)to, from, bytes, stream);
    OUTSIDE_RECORDINGS();
    // Into pageable memory the call returns when the bytes are there.
    auto* of = static_cast<Stream*>(stream);
    if (!of || of->device != current) return INVALID_HANDLE;
    if (int error = run_all(of)) return error;
    if (!is_reachable(current, from, bytes)) return kept(ILLEGAL_ADDRESS);
    memcpy(to, pointer<void>(from), bytes);
    return OK;
}
API cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, void* stream) {
    BEGIN(true);
    Device* device = current;
    return enqueue(static_cast<Stream*>(stream), [=] {
        if (!is_reachable(device, at, bytes)) return (int)ILLEGAL_ADDRESS;
        memset(pointer<void>(at), value, bytes);
        return (int)OK;
    });
}

// --- modules and launches ------------------------------------------------------------------------

API cuModuleLoadData(void** module, const void* image) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    emu::Cubin cubin;
    // PTX, which a driver compiles, has no registers to be looked at; what is loaded here is what
    // was compiled.
    if (!cubin.read(static_cast<const unsigned char*>(image))) return INVALID_IMAGE;
    if (cubin.architecture / 10 != architecture() / 10 || cubin.architecture > architecture())
        return NO_BINARY;
    auto loaded = std::make_unique<Module>();
    for (auto& [name, info] : cubin.kernels) {
        const emu::Kernel* kernel = emulated(name.c_str());
        if (!kernel) return complain(name.c_str(), "the emulator was built without this kernel");
        loaded->functions[name].reset(new Function{kernel, info});
    }
    *module = loaded.release();
    return OK;
}
API cuModuleGetFunction(void** function, void* module, const char* name) {
    BEGIN(true);
    auto& all = static_cast<Module*>(module)->functions;
    auto found = all.find(name);
    if (found == all.end()) return NOT_FOUND;
    *function = found->second.get();
    return OK;
}
API cuFuncGetAttribute(int* value, int which, void* function) {
    BEGIN(true);
    if (which != 1)
        return complain("cuFuncGetAttribute",
                        "an attribute that is not emulated"); // SHARED_SIZE_BYTES
    *value = (int)static_cast<Function*>(function)->info.static_shared;
    return OK;
}
API cuFuncSetAttribute(void* function, int which, int value) {
    BEGIN(true);
    auto* of = static_cast<Function*>(function);
    if (which == 9) { // PREFERRED_SHARED_MEMORY_CARVEOUT
        if (value < -1 || value > 100) return INVALID_VALUE;
        of->carveout = value;
        return OK;
    }
    if (which != 8)
        return complain("cuFuncSetAttribute",
                        "an attribute that is not emulated"); // MAX_DYNAMIC_SHARED_SIZE_BYTES
    if (value < 0 || (unsigned)value + of->info.static_shared > shared_bytes())
        return INVALID_VALUE;
    of->most_dynamic = (unsigned)value;
    return OK;
}
// The head of CUlaunchConfig, and CUlaunchAttribute.
struct LaunchConfig {
    unsigned grid[3], cta[3], dynamic;
    void* stream;
    const struct LaunchAttribute* attributes;
    unsigned count;
};
struct LaunchAttribute {
    int id;
    char padding[4];
    union {
        int number;
        char bytes[64];
    } value;
};
const int PROGRAMMATIC_STREAM_SERIALIZATION = 6;

static int launch(const LaunchConfig& config, void* function, void** params, bool is_early) {
    const Function& of = *static_cast<Function*>(function);
    if (int error = check_launch(of, config.grid, config.cta, config.dynamic)) return error;
    // A parameter is what it is at the call.
    std::vector<uint64_t> words(of.kernel->count);
    for (unsigned i = 0; i < of.kernel->count; i++)
        memcpy(&words[i], params[i], of.kernel->sizes[i]);
    const emu::Kernel* kernel = of.kernel;
    auto pointers_to = [](std::vector<uint64_t>& words) {
        std::vector<void*> pointers;
        for (auto& word : words) pointers.push_back(&word);
        return pointers;
    };
    Command command;
    command.is_launch = true;
    command.run = [=](uint64_t state) {
        if (int error = planned_fault(kernel->name)) return error;
        std::vector<uint64_t> own = words;
        int status = sepal_emu_launch(kernel->name, config.grid, config.cta, config.dynamic,
                                      pointers_to(own).data(), kernel->sizes, kernel->count,
                                      std::thread::hardware_concurrency(), 1, false,
                                      is_early ? &state : nullptr);
        if (status < 5) return status ? complain(kernel->name, "the emulator refuses it") : (int)OK;
        complain(kernel->name, status == 5 ? "reads before pdl_wait what an earlier launch wrote"
                                           : "a thread ends without pdl_wait");
        return (int)LAUNCH_FAILED;
    };
    if (is_early)
        command.rehearse = [=] {
            std::vector<uint64_t> own = words;
            return sepal_emu_rehearse(kernel->name, config.grid, config.cta, config.dynamic,
                                      pointers_to(own).data(), kernel->sizes, kernel->count);
        };
    return enqueue(static_cast<Stream*>(config.stream), std::move(command));
}

API cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned cx, unsigned cy,
                   unsigned cz, unsigned dynamic, void* stream, void** params, void** extra) {
    BEGIN(true);
    if (!function || extra) return INVALID_HANDLE;
    return launch({{gx, gy, gz}, {cx, cy, cz}, dynamic, stream, nullptr, 0}, function, params,
                  false);
}
API cuLaunchKernelEx(const void* config, void* function, void** params, void** extra) {
    BEGIN(true);
    if (!function || extra) return INVALID_HANDLE;
    const LaunchConfig& of = *static_cast<const LaunchConfig*>(config);
    bool is_early = false;
    for (unsigned i = 0; i < of.count; i++) {
        const LaunchAttribute& attribute = of.attributes[i];
        if (attribute.id != PROGRAMMATIC_STREAM_SERIALIZATION) return INVALID_VALUE;
        if (architecture() < 90) return NOT_SUPPORTED;
        // From this version on, a recording keeps that a launch may start early.
        if (static_cast<Stream*>(of.stream)->records &&
            setting("EMU_CUDA_VERSION", VERSION) < 12030)
            return CAPTURE_UNSUPPORTED;
        is_early = attribute.value.number != 0;
    }
    return launch(of, function, params, is_early);
}

// --- streams, events, graphs ---------------------------------------------------------------------

API cuStreamCreate(void** stream, unsigned) {
    BEGIN(true);
    streams.push_back(new Stream{current, {}, false, false, {}, {}});
    *stream = streams.back();
    return OK;
}
API cuStreamSynchronize(void* stream) {
    BEGIN(true);
    auto* of = static_cast<Stream*>(stream);
    if (!of || of->device != current) return INVALID_HANDLE;
    OUTSIDE_RECORDINGS();
    return run_all(of);
}
API cuStreamQuery(void* stream) {
    if (runs_beside) return NOT_READY;
    BEGIN(true);
    auto* of = static_cast<Stream*>(stream);
    if (!of || of->device != current) return INVALID_HANDLE;
    OUTSIDE_RECORDINGS();
    return ask(of, [] { return false; });
}
API cuEventCreate(void** event, unsigned) {
    BEGIN(true);
    *event = new Event;
    return OK;
}
API cuEventDestroy_v2(void* event) {
    BEGIN(true);
    auto* of = static_cast<Event*>(event);
    // Its record may still wait in the stream.
    if (of->stream && !of->is_done)
        if (int error = run_until(of->stream, [&] { return of->is_done; })) return error;
    delete of;
    return OK;
}
API cuEventRecord(void* event, void* stream) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    auto* of = static_cast<Event*>(event);
    of->stream = static_cast<Stream*>(stream);
    of->is_done = false;
    return enqueue(of->stream, [=] {
        of->is_done = true;
        of->seconds = now();
        return (int)OK;
    });
}
API cuEventSynchronize(void* event) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    auto* of = static_cast<Event*>(event);
    return of->stream ? run_until(of->stream, [&] { return of->is_done; }) : (int)OK;
}
API cuEventQuery(void* event) {
    if (runs_beside) return NOT_READY;
    BEGIN(true);
    auto* of = static_cast<Event*>(event);
    return of->stream ? ask(of->stream, [=] { return of->is_done; }) : (int)OK;
}
API cuEventElapsedTime(float* milliseconds, void* start, void* end) {
    BEGIN(true);
    auto *from = static_cast<Event*>(start), *to = static_cast<Event*>(end);
    if (!from->is_done || !to->is_done) return NOT_READY;
    *milliseconds = (float)((to->seconds - from->seconds) * 1e3);
    return OK;
}
API cuStreamBeginCapture_v2(void* stream, int) {
    BEGIN(true);
    OUTSIDE_RECORDINGS();
    auto* of = static_cast<Stream*>(stream);
    if (!of || of->device != current) return INVALID_HANDLE;
    of->records = true;
    of->recorder = std::this_thread::get_id();
    of->is_spoilt = false;
    of->recorded.clear();
    return OK;
}
API cuStreamEndCapture(void* stream, void** graph) {
    auto* of = static_cast<Stream*>(stream);
    // A failure ends the recording, too.
    bool has_recorded = false;
    if (of) {
        std::lock_guard<std::recursive_mutex> held(lock);
        has_recorded = of->records;
        of->records = false;
    }
    BEGIN(true);
    if (!has_recorded) return INVALID_VALUE;
    if (of->is_spoilt) return CAPTURE_INVALIDATED;
    *graph = new Graph(std::move(of->recorded));
    return OK;
}
API cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long) {
    BEGIN(true);
    *ready = new Graph(*static_cast<Graph*>(graph));
    return OK;
}
API cuGraphLaunch(void* ready, void* stream) {
    BEGIN(true);
    // A graph begins when all before it is done.
    bool is_first = true;
    for (Command command : *static_cast<Graph*>(ready)) {
        if (is_first) command.rehearse = nullptr;
        is_first = false;
        if (int error = enqueue(static_cast<Stream*>(stream), std::move(command))) return error;
    }
    return OK;
}
API cuGraphDestroy(void* graph) {
    BEGIN(true);
    delete static_cast<Graph*>(graph);
    return OK;
}
API cuGraphExecDestroy(void* ready) {
    BEGIN(true);
    delete static_cast<Graph*>(ready);
    return OK;
}
