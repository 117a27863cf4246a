// The functions of NVIDIA's driver that coliconv calls, on the CPU: for tests where there is no GPU.
//
// What is asked of a stream is done when somebody waits for it and no sooner, so that a caller who changes what is still to be
// copied is found out; streams know of each other only what events tell. Every buffer ends at a page that nobody may touch, and
// memory of one GPU cannot be touched by kernels of another; new memory holds 0xff. By the environment:
//
//     EMULATED_CUDA_DEVICES=1             how many GPUs there are
//     EMULATED_CUDA_CAPABILITY=90         their compute capability; with commas of one after the other, the last of all others
//     EMULATED_CUDA_MEMORY=4294967296     bytes of memory of each, or of one after the other
//     EMULATED_CUDA_PEERS=1               whether GPUs see each other's memory
//     EMULATED_CUDA_WAITS=1               whether streams wait for events of others
//     EMULATED_CUDA_FAIL=NAME=CODE@N,…    the N-th call of a function gives that code
//     EMULATED_CUDA_ORDER=backwards       threads of a block take turns from the last to the first
//     EMULATED_CUDA_LOG=FILE              a line for each kernel that was run
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "launch.h"

#ifdef COLICONV_WITHOUT
#define LEFT_OUT_cuEventRecord [[maybe_unused]] static
#else
#define LEFT_OUT_cuEventRecord extern "C" __attribute__((visibility("default")))
#endif
#define API extern "C" __attribute__((visibility("default"))) unsigned

namespace emulated {

static const Registered* first_kernel;

Registered::Registered(const char* its_name, unsigned its_threads, Call* (*its_call)(void**))
    : name(its_name), threads(its_threads), call(its_call), next(first_kernel) {
    first_kernel = this;
}

}  // namespace emulated

namespace {

enum Code : unsigned {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    NotInitialized = 3,
    NoDevice = 100,
    InvalidDevice = 101,
    InvalidImage = 200,
    InvalidContext = 201,
    PeerAccessUnsupported = 217,
    InvalidHandle = 400,
    NotFound = 500,
    NotReady = 600,
    PeerAccessAlreadyEnabled = 704,
    IllegalAddress = 700,
    LaunchOutOfResources = 701,
    LaunchFailed = 719,
    CaptureUnsupported = 900,
    CaptureInvalidated = 901,
};

const std::map<unsigned, const char*> NAMES = {
    {0, "CUDA_SUCCESS"},
    {1, "CUDA_ERROR_INVALID_VALUE"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "CUDA_ERROR_NOT_INITIALIZED"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"},
    {200, "CUDA_ERROR_INVALID_IMAGE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
    {218, "CUDA_ERROR_INVALID_PTX"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
    {400, "CUDA_ERROR_INVALID_HANDLE"},
    {500, "CUDA_ERROR_NOT_FOUND"},
    {600, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

struct Device {
    int contexts = 0;
    std::set<Device*> peers;
};

struct Memory {
    size_t bytes;
    void* mapped;
    size_t mapped_bytes;
    Device* device;
};

struct Stream;

// Something to do, or another stream to wait for.
struct Task {
    std::function<void()> work;
    std::set<Device*> touched;
    std::shared_ptr<Stream> after;
    size_t until = 0;
};

struct Stream {
    Device* device;
    std::deque<Task> tasks;      // not done yet
    size_t done = 0, asked = 0;  // of all that ever were
};

struct Event {
    Device* device;
    bool timing;
    std::shared_ptr<Stream> stream;  // where it was recorded
    size_t recorded = 0;             // how many tasks of the stream come before
    double milliseconds = 0;         // when they were done
};

struct Graph {
    std::vector<Task> tasks;
};

struct Module {
    bool ptx;
};

std::recursive_mutex everything;
bool initialized;
std::map<uintptr_t, Memory> memory;
std::set<void*> host_memory;
std::map<void*, std::shared_ptr<Stream>> streams;
std::set<Event*> events;
std::set<Module*> modules;
std::set<Graph*> graphs, ready_graphs;
Stream* captured;             // whose launches are recorded
Graph* capture;               // into this
bool capture_is_invalid;      // something was asked for that cannot be recorded
std::set<Device*> touchable;  // whose memory can be touched now
unsigned broken;  // an error that stays
Device devices[16];
thread_local Device* entered;

// A number; of a list the one of a device.
long long environment(const char* name, long long otherwise, long device = 0) {
    const char* text = getenv(name);
    if (!text || !*text) return otherwise;
    for (const char* comma; device > 0 && (comma = strchr(text, ',')); device--) text = comma + 1;
    return atoll(text);
}

// The code that a call of a function is to give, by EMULATED_CUDA_FAIL.
unsigned failing(const char* function) {
    static std::map<std::string, long> calls;
    const char* text = getenv("EMULATED_CUDA_FAIL");
    const long call = ++calls[function];
    for (std::string rest = text ? text : ""; !rest.empty();) {
        const size_t comma = rest.find(',');
        const std::string one = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        const size_t equals = one.find('='), at = one.find('@');
        if (equals == std::string::npos || one.substr(0, equals) != function) continue;
        if (at == std::string::npos || atol(one.c_str() + at + 1) == call) return atol(one.c_str() + equals + 1);
    }
    return Success;
}

#define BEGIN(function)                                       \
    std::lock_guard<std::recursive_mutex> lock(everything);   \
    if (unsigned code = failing(#function)) return code;      \
    if (!initialized) return NotInitialized;
#define BEGIN_IN_CONTEXT(function)                            \
    BEGIN(function)                                           \
    if (!entered || entered->contexts == 0) return InvalidContext; \
    if (broken) return broken;

// Lets memory of some devices be touched and no other.
void let_touch(const std::set<Device*>& wanted) {
    if (wanted == touchable) return;
    const size_t page = sysconf(_SC_PAGESIZE);
    for (const auto& one : memory) {
        const Memory& part = one.second;
        const bool now = touchable.count(part.device), then = wanted.count(part.device);
        if (now != then)
            mprotect((char*)part.mapped + page, part.mapped_bytes - 2 * page, then ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
    touchable = wanted;
}

// Does what was asked of a stream, up to a task, and what of other streams it waits for.
unsigned work(Stream& stream, size_t until) {
    while (stream.done < until && !broken) {
        const Task task = std::move(stream.tasks.front());
        stream.tasks.pop_front();
        stream.done++;
        if (task.after) {
            work(*task.after, task.until);
        } else {
            let_touch(task.touched);
            task.work();
        }
    }
    return broken;
}

void ask(Stream& stream, Task task) {
    if (captured == &stream) return capture->tasks.push_back(std::move(task));
    stream.tasks.push_back(std::move(task));
    stream.asked++;
}

void ask(Stream& stream, std::function<void()> work) { ask(stream, Task{std::move(work), {stream.device}, nullptr, 0}); }

// Whether memory of a device has all these bytes.
bool inside(uint64_t address, size_t bytes, const Device* device) {
    auto found = memory.upper_bound(address);
    if (found == memory.begin()) return false;
    --found;
    return address + bytes <= found->first + found->second.bytes && found->second.device == device;
}

size_t used(const Device* device) {
    size_t sum = 0;
    for (const auto& one : memory)
        if (one.second.device == device) sum += one.second.bytes;
    return sum;
}

// The stream, if it is one of the device that the thread has entered.
Stream* own(void* stream) {
    const auto found = streams.find(stream);
    return found != streams.end() && found->second->device == entered ? found->second.get() : nullptr;
}

// Whether something is asked of a stream that cannot be recorded.
bool is_captured(void* stream) {
    const bool now = captured && captured == stream;
    if (now) capture_is_invalid = true;
    return now;
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

int device_count() { return (int)environment("EMULATED_CUDA_DEVICES", 1); }

size_t memory_bytes(long device) { return environment("EMULATED_CUDA_MEMORY", 4LL << 30, device); }

}  // namespace

API cuInit(unsigned flags) {
    std::lock_guard<std::recursive_mutex> lock(everything);
    if (unsigned code = failing("cuInit")) return code;
    if (flags) return InvalidValue;
    if (device_count() == 0) return NoDevice;
    initialized = true;
    return Success;
}

API cuDriverGetVersion(int* version) {
    *version = 12020;
    return failing("cuDriverGetVersion");
}

API cuGetErrorName(unsigned code, const char** name) {
    const auto found = NAMES.find(code);
    *name = found == NAMES.end() ? nullptr : found->second;
    return found == NAMES.end() ? InvalidValue : Success;
}

API cuDeviceGetCount(int* count) {
    BEGIN(cuDeviceGetCount)
    *count = device_count();
    return Success;
}

API cuDeviceGet(int* device, int ordinal) {
    BEGIN(cuDeviceGet)
    if (ordinal < 0 || ordinal >= device_count()) return InvalidDevice;
    *device = ordinal;
    return Success;
}

API cuDeviceGetName(char* name, int bytes, int device) {
    BEGIN(cuDeviceGetName)
    if (device < 0 || device >= device_count()) return InvalidDevice;
    snprintf(name, bytes, "Emulated GPU");
    return Success;
}

API cuDeviceGetAttribute(int* value, int attribute, int device) {
    BEGIN(cuDeviceGetAttribute)
    if (device < 0 || device >= device_count()) return InvalidDevice;
    const int capability = (int)environment("EMULATED_CUDA_CAPABILITY", 90, device);
    switch (attribute) {
        case 5: *value = 0x7fffffff; return Success;
        case 6: case 7: *value = 65535; return Success;
        case 75: *value = capability / 10; return Success;
        case 76: *value = capability % 10; return Success;
        default: return InvalidValue;
    }
}

API cuDeviceTotalMem_v2(size_t* bytes, int device) {
    BEGIN(cuDeviceTotalMem_v2)
    if (device < 0 || device >= device_count()) return InvalidDevice;
    *bytes = memory_bytes(device);
    return Success;
}

API cuDevicePrimaryCtxRetain(void** context, int device) {
    BEGIN(cuDevicePrimaryCtxRetain)
    if (device < 0 || device >= device_count() || device >= 16) return InvalidDevice;
    devices[device].contexts++;
    *context = &devices[device];
    return Success;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN(cuDevicePrimaryCtxRelease_v2)
    if (device < 0 || device >= device_count() || devices[device].contexts == 0) return InvalidContext;
    if (--devices[device].contexts == 0) {
        // what went wrong in a context ends with it
        broken = Success;
        devices[device].peers.clear();
        for (auto& one : streams)
            if (one.second->device == &devices[device]) {
                one.second->done += one.second->tasks.size();
                one.second->tasks.clear();
            }
    }
    return Success;
}

API cuCtxSetCurrent(void* context) {
    BEGIN(cuCtxSetCurrent)
    entered = (Device*)context;
    return Success;
}

API cuMemGetInfo_v2(size_t* available, size_t* total) {
    BEGIN_IN_CONTEXT(cuMemGetInfo_v2)
    *total = memory_bytes(entered - devices);
    *available = *total - used(entered);
    return Success;
}

API cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    BEGIN_IN_CONTEXT(cuMemAlloc_v2)
    if (bytes == 0) return InvalidValue;
    if (bytes > memory_bytes(entered - devices) - used(entered)) return OutOfMemory;
    const size_t page = sysconf(_SC_PAGESIZE), aligned = (bytes + 15) / 16 * 16;
    const size_t inner = (aligned + page - 1) / page * page, mapped = inner + 2 * page;
    char* at = (char*)mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || mprotect(at + page, inner, PROT_READ | PROT_WRITE)) return OutOfMemory;
    char* begin = at + page + inner - aligned;
    memset(begin, 0xff, aligned);
    *address = (uint64_t)begin;
    memory[*address] = {bytes, at, mapped, entered};
    if (!touchable.count(entered)) mprotect(at + page, inner, PROT_NONE);
    return Success;
}

API cuMemFree_v2(uint64_t address) {
    BEGIN(cuMemFree_v2)
    const auto found = memory.find(address);
    if (found == memory.end()) return InvalidValue;
    for (auto& one : streams)
        if (one.second->device == found->second.device) work(*one.second, one.second->asked);
    munmap(found->second.mapped, found->second.mapped_bytes);
    memory.erase(found);
    return broken;
}

API cuMemAllocHost_v2(void** host, size_t bytes) {
    BEGIN_IN_CONTEXT(cuMemAllocHost_v2)
    *host = malloc(bytes);
    host_memory.insert(*host);
    return *host ? Success : OutOfMemory;
}

API cuMemFreeHost(void* host) {
    BEGIN(cuMemFreeHost)
    if (!host_memory.erase(host)) return InvalidValue;
    free(host);
    return Success;
}

API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    BEGIN_IN_CONTEXT(cuMemcpyHtoDAsync_v2)
    if (!own(stream)) return InvalidHandle;
    if (is_captured(stream)) return CaptureUnsupported;  // as for cuEventRecord
    if (!inside(to, bytes, entered)) return InvalidValue;
    ask(*own(stream), [=] { memcpy((void*)to, from, bytes); });
    return Success;
}

API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    BEGIN_IN_CONTEXT(cuMemcpyDtoHAsync_v2)
    if (!own(stream)) return InvalidHandle;
    if (is_captured(stream)) return CaptureUnsupported;  // as for cuEventRecord
    if (!inside(from, bytes, entered)) return InvalidValue;
    ask(*own(stream), [=] { memcpy(to, (void*)from, bytes); });
    return Success;
}

API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    BEGIN_IN_CONTEXT(cuMemcpyDtoDAsync_v2)
    if (!own(stream)) return InvalidHandle;
    if (is_captured(stream)) return CaptureUnsupported;  // as for cuEventRecord
    if (!inside(to, bytes, entered) || !inside(from, bytes, entered)) return InvalidValue;
    ask(*own(stream), [=] { memcpy((void*)to, (void*)from, bytes); });
    return Success;
}

API cuMemcpyPeerAsync(uint64_t to, void* to_context, uint64_t from, void* from_context, size_t bytes, void* stream) {
    BEGIN_IN_CONTEXT(cuMemcpyPeerAsync)
    Device *const target = (Device*)to_context, *const source = (Device*)from_context;
    if (!own(stream)) return InvalidHandle;
    if (is_captured(stream)) return CaptureUnsupported;  // as for cuEventRecord
    if (target->contexts == 0 || source->contexts == 0 || target == source) return InvalidContext;
    if (!inside(to, bytes, target) || !inside(from, bytes, source)) return InvalidValue;
    ask(*own(stream), Task{[=] { memcpy((void*)to, (void*)from, bytes); }, {target, source}, nullptr, 0});
    return Success;
}

API cuDeviceCanAccessPeer(int* can, int device, int peer) {
    BEGIN(cuDeviceCanAccessPeer)
    if (device < 0 || device >= device_count() || peer < 0 || peer >= device_count()) return InvalidDevice;
    *can = device != peer && environment("EMULATED_CUDA_PEERS", 1) != 0;
    return Success;
}

API cuCtxEnablePeerAccess(void* context, unsigned flags) {
    BEGIN_IN_CONTEXT(cuCtxEnablePeerAccess)
    Device* const peer = (Device*)context;
    if (flags || peer == entered) return InvalidValue;
    if (peer->contexts == 0) return InvalidContext;
    if (!environment("EMULATED_CUDA_PEERS", 1)) return PeerAccessUnsupported;
    return entered->peers.insert(peer).second ? Success : PeerAccessAlreadyEnabled;
}

API cuStreamCreate(void** stream, unsigned flags) {
    BEGIN_IN_CONTEXT(cuStreamCreate)
    if (flags > 1) return InvalidValue;
    auto made = std::make_shared<Stream>();
    made->device = entered;
    *stream = made.get();
    streams[*stream] = made;
    return Success;
}

API cuStreamDestroy_v2(void* stream) {
    BEGIN(cuStreamDestroy_v2)
    // what waits for it keeps it
    return streams.erase(stream) ? Success : InvalidHandle;
}

API cuStreamSynchronize(void* stream) {
    BEGIN_IN_CONTEXT(cuStreamSynchronize)
    if (!own(stream)) return InvalidHandle;
    if (is_captured(stream)) return CaptureUnsupported;
    return work(*own(stream), own(stream)->asked);
}

API cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    BEGIN_IN_CONTEXT(cuStreamWaitEvent)
    if (flags) return InvalidValue;
    if (!own(stream) || !events.count((Event*)event)) return InvalidHandle;
    if (is_captured(stream)) return CaptureUnsupported;  // as for cuEventRecord
    const Event& waited = *(Event*)event;
    const bool waits = environment("EMULATED_CUDA_WAITS", 1);
    if (waited.stream && waits) ask(*own(stream), Task{nullptr, {}, waited.stream, waited.recorded});
    return Success;
}

API cuEventCreate(void** event, unsigned flags) {
    BEGIN_IN_CONTEXT(cuEventCreate)
    Event* made = new Event{entered, !(flags & 2), nullptr, 0, 0};
    events.insert(made);
    *event = made;
    return Success;
}

API cuEventDestroy_v2(void* event) {
    BEGIN(cuEventDestroy_v2)
    if (!events.erase((Event*)event)) return InvalidHandle;
    delete (Event*)event;
    return Success;
}

LEFT_OUT_cuEventRecord unsigned cuEventRecord(void* event, void* stream) {
    BEGIN_IN_CONTEXT(cuEventRecord)
    if (!events.count((Event*)event) || !own(stream) || ((Event*)event)->device != entered) return InvalidHandle;
    if (is_captured(stream)) return CaptureUnsupported;  // not by the driver, but nobody asks for it
    Event* one = (Event*)event;
    one->stream = streams[stream];
    if (one->timing) ask(*own(stream), [one] { if (events.count(one)) one->milliseconds = now(); });
    one->recorded = own(stream)->asked;
    return Success;
}

API cuEventElapsedTime(float* milliseconds, void* first, void* last) {
    BEGIN_IN_CONTEXT(cuEventElapsedTime)
    const Event *from = (Event*)first, *to = (Event*)last;
    for (const Event* one : {from, to}) {
        if (!events.count((Event*)one) || !one->timing || !one->stream) return InvalidHandle;
        if (one->recorded > one->stream->done) return NotReady;
    }
    *milliseconds = (float)(to->milliseconds - from->milliseconds);
    return Success;
}

API cuStreamBeginCapture_v2(void* stream, int mode) {
    BEGIN_IN_CONTEXT(cuStreamBeginCapture_v2)
    if (!own(stream)) return InvalidHandle;
    if (capture || mode < 0 || mode > 2) return InvalidValue;
    captured = own(stream);
    capture = new Graph;
    capture_is_invalid = false;
    return Success;
}

API cuStreamEndCapture(void* stream, void** graph) {
    BEGIN_IN_CONTEXT(cuStreamEndCapture)
    *graph = nullptr;
    if (!capture || captured != stream) return InvalidValue;
    Graph* made = capture;
    capture = nullptr;
    captured = nullptr;
    if (capture_is_invalid) {
        delete made;
        return CaptureInvalidated;
    }
    graphs.insert(made);
    *graph = made;
    return Success;
}

API cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long flags) {
    BEGIN_IN_CONTEXT(cuGraphInstantiateWithFlags)
    if (!graphs.count((Graph*)graph)) return InvalidHandle;
    if (flags) return InvalidValue;
    Graph* made = new Graph(*(Graph*)graph);
    ready_graphs.insert(made);
    *ready = made;
    return Success;
}

API cuGraphLaunch(void* ready, void* stream) {
    BEGIN_IN_CONTEXT(cuGraphLaunch)
    if (!ready_graphs.count((Graph*)ready) || !own(stream)) return InvalidHandle;
    if (is_captured(stream)) return CaptureUnsupported;  // as above
    for (const auto& task : ((Graph*)ready)->tasks) ask(*own(stream), task);
    return Success;
}

API cuGraphDestroy(void* graph) {
    BEGIN(cuGraphDestroy)
    if (!graphs.erase((Graph*)graph)) return InvalidHandle;
    delete (Graph*)graph;
    return Success;
}

API cuGraphExecDestroy(void* ready) {
    BEGIN(cuGraphExecDestroy)
    if (!ready_graphs.erase((Graph*)ready)) return InvalidHandle;
    delete (Graph*)ready;
    return Success;
}

API cuEventSynchronize(void* event) {
    BEGIN_IN_CONTEXT(cuEventSynchronize)
    if (!events.count((Event*)event)) return InvalidHandle;
    const Event& waited = *(Event*)event;
    return waited.stream ? work(*waited.stream, waited.recorded) : broken;
}

API cuModuleLoadData(void** module, const void* image) {
    BEGIN_IN_CONTEXT(cuModuleLoadData)
    const char* bytes = (const char*)image;
    // machine code is ELF; PTX is text with a version, which begins with a comment as compilers write it
    const bool ptx = !memcmp(bytes, "//", 2);
    if (!ptx && memcmp(bytes, "\177ELF", 4)) return InvalidImage;
    if (ptx && !strstr(bytes, "\n.version ")) return 218;
    Module* made = new Module{ptx};
    modules.insert(made);
    *module = made;
    return Success;
}

API cuModuleUnload(void* module) {
    BEGIN(cuModuleUnload)
    if (!modules.erase((Module*)module)) return InvalidHandle;
    delete (Module*)module;
    return Success;
}

API cuModuleGetFunction(void** function, void* module, const char* name) {
    BEGIN_IN_CONTEXT(cuModuleGetFunction)
    if (!modules.count((Module*)module)) return InvalidHandle;
    for (const emulated::Registered* kernel = emulated::first_kernel; kernel; kernel = kernel->next)
        if (!strcmp(kernel->name, name)) {
            *function = (void*)kernel;
            return Success;
        }
    return NotFound;
}

API cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra) {
    BEGIN_IN_CONTEXT(cuLaunchKernel)
    if (!function || !own(stream) || extra) return InvalidHandle;
    const emulated::Registered& kernel = *(const emulated::Registered*)function;
    if (!grid_x || !grid_y || !grid_z || grid_x > 0x7fffffff || grid_y > 65535 || grid_z > 65535) return InvalidValue;
    // kernels are written for one size of groups: less would leave work undone
    if (block_x != kernel.threads || block_y != 1 || block_z != 1 || shared) return LaunchOutOfResources;
    // the parameters are copied now, as the driver does
    const std::shared_ptr<emulated::Call> call(kernel.call(parameters));
    const emulated::Index groups = {grid_x, grid_y, grid_z};
    ask(*own(stream), [&kernel, groups, call] {
        const char* why = nullptr;
        broken = emulated::run(kernel, groups, *call, &why);
        if (why) fprintf(stderr, "emulated GPU: kernel %s: %s\n", kernel.name, why);
        if (const char* path = getenv("EMULATED_CUDA_LOG"))
            if (FILE* log = fopen(path, "a")) {
                fprintf(log, "%s\n", kernel.name);
                fclose(log);
            }
    });
    return Success;
}
