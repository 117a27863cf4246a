// The functions of NVIDIA's driver that coliconv calls, on the CPU: for tests where there is no GPU.
//
// What is asked of a stream is done when somebody waits for it and no sooner, so that a caller who changes what is still to be
// copied is found out; streams wait for one another by events alone. Every buffer ends at a page that nobody may touch; new memory holds 0xff. By the environment:
//
//     EMULATED_CUDA_DEVICES=1             how many GPUs there are
//     EMULATED_CUDA_CAPABILITY=90         their compute capability
//     EMULATED_CUDA_MEMORY=4294967296     bytes of memory of each
//     EMULATED_CUDA_FAIL=NAME=CODE@N,…    the N-th call of a function gives that code
//     EMULATED_CUDA_ORDER=backwards       threads of a block take turns from the last to the first
//     EMULATED_CUDA_COPIES=early          streams on which no kernel was ever started do at once what is asked of them
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
    InvalidHandle = 400,
    NotFound = 500,
    NotReady = 600,
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
    {218, "CUDA_ERROR_INVALID_PTX"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
    {400, "CUDA_ERROR_INVALID_HANDLE"},
    {500, "CUDA_ERROR_NOT_FOUND"},
    {600, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

struct Memory {
    size_t bytes;
    void* mapped;
    size_t mapped_bytes;
};

struct Stream {
    std::deque<std::function<void()>> tasks;  // not done yet
    size_t done = 0, asked = 0;               // of all that ever were
    bool computes = false;                    // a kernel was started on it
};

struct Event {
    bool timing = false;
    bool marked = false;       // it was recorded
    Stream* stream = nullptr;  // on which it was recorded last
    size_t recorded = 0;       // how many tasks of the stream come before
    double milliseconds = 0;   // when they were done
};

struct Graph {
    std::vector<std::function<void()>> tasks;
};

struct Module {
    bool ptx;
};

struct Device {
    int contexts = 0;
};

std::recursive_mutex everything;
bool initialized;
std::map<uintptr_t, Memory> memory;
std::set<void*> host_memory;
std::set<Stream*> streams;
std::set<Event*> events;
std::set<Module*> modules;
std::set<Graph*> graphs, ready_graphs;
Stream* captured;         // the stream whose launches are recorded
Graph* capture;           // into this
bool capture_is_invalid;  // something was asked for that cannot be recorded
unsigned broken;  // an error that stays
Device devices[16];
thread_local Device* entered;

long long environment(const char* name, long long otherwise) {
    const char* text = getenv(name);
    return text && *text ? atoll(text) : otherwise;
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

// Does what was asked of a stream, up to a task. One that waits for another stream does what that has to do before.
unsigned work(Stream* stream, size_t until) {
    while (stream->done < until && !broken) {
        const auto task = std::move(stream->tasks.front());
        stream->tasks.pop_front();
        stream->done++;
        task();
    }
    return broken;
}

unsigned work_everywhere() {
    for (Stream* stream : streams) work(stream, stream->asked);
    return broken;
}

void ask(Stream* stream, std::function<void()> task) {
    static const bool early = getenv("EMULATED_CUDA_COPIES") && !strcmp(getenv("EMULATED_CUDA_COPIES"), "early");
    if (capture && stream == captured) return capture->tasks.push_back(std::move(task));
    stream->tasks.push_back(std::move(task));
    stream->asked++;
    if (early && !stream->computes) work(stream, stream->asked);
}

// Whether memory of the device has all these bytes.
bool inside(uint64_t address, size_t bytes) {
    auto found = memory.upper_bound(address);
    if (found == memory.begin()) return false;
    --found;
    return address + bytes <= found->first + found->second.bytes;
}

size_t used() {
    size_t sum = 0;
    for (const auto& one : memory) sum += one.second.bytes;
    return sum;
}

// Whether something is asked of a stream that cannot be recorded.
bool is_captured() {
    if (capture) capture_is_invalid = true;
    return capture;
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

int device_count() { return (int)environment("EMULATED_CUDA_DEVICES", 1); }
size_t memory_bytes() { return environment("EMULATED_CUDA_MEMORY", 4LL << 30); }

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
    const int capability = (int)environment("EMULATED_CUDA_CAPABILITY", 90);
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
    *bytes = memory_bytes();
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
        for (Stream* stream : streams) {
            stream->done += stream->tasks.size();
            stream->tasks.clear();
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
    *total = memory_bytes();
    *available = *total - used();
    return Success;
}

API cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    BEGIN_IN_CONTEXT(cuMemAlloc_v2)
    if (bytes == 0) return InvalidValue;
    if (bytes > memory_bytes() - used()) return OutOfMemory;
    const size_t page = sysconf(_SC_PAGESIZE), aligned = (bytes + 15) / 16 * 16;
    const size_t inner = (aligned + page - 1) / page * page, mapped = inner + 2 * page;
    char* at = (char*)mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || mprotect(at + page, inner, PROT_READ | PROT_WRITE)) return OutOfMemory;
    char* begin = at + page + inner - aligned;
    memset(begin, 0xff, aligned);
    *address = (uint64_t)begin;
    memory[*address] = {bytes, at, mapped};
    return Success;
}

API cuMemFree_v2(uint64_t address) {
    BEGIN(cuMemFree_v2)
    const auto found = memory.find(address);
    if (found == memory.end()) return InvalidValue;
    work_everywhere();
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
    if (!streams.count((Stream*)stream)) return InvalidHandle;
    if (is_captured()) return CaptureUnsupported;  // as for cuEventRecord
    if (!inside(to, bytes)) return InvalidValue;
    ask((Stream*)stream, [=] { memcpy((void*)to, from, bytes); });
    return Success;
}

API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    BEGIN_IN_CONTEXT(cuMemcpyDtoHAsync_v2)
    if (!streams.count((Stream*)stream)) return InvalidHandle;
    if (is_captured()) return CaptureUnsupported;  // as for cuEventRecord
    if (!inside(from, bytes)) return InvalidValue;
    ask((Stream*)stream, [=] { memcpy(to, (void*)from, bytes); });
    return Success;
}

API cuStreamCreate(void** stream, unsigned flags) {
    BEGIN_IN_CONTEXT(cuStreamCreate)
    if (flags > 1) return InvalidValue;
    Stream* made = new Stream;
    streams.insert(made);
    *stream = made;
    return Success;
}

API cuStreamDestroy_v2(void* stream) {
    BEGIN(cuStreamDestroy_v2)
    Stream* gone = (Stream*)stream;
    if (!streams.count(gone)) return InvalidHandle;
    work(gone, gone->asked);
    // events that were recorded on it have happened
    for (Event* event : events)
        if (event->stream == gone) event->stream = nullptr;
    streams.erase(gone);
    delete gone;
    return Success;
}

API cuStreamSynchronize(void* stream) {
    BEGIN_IN_CONTEXT(cuStreamSynchronize)
    if (!streams.count((Stream*)stream)) return InvalidHandle;
    if (is_captured()) return CaptureUnsupported;
    return work((Stream*)stream, ((Stream*)stream)->asked);
}

API cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    BEGIN_IN_CONTEXT(cuStreamWaitEvent)
    if (!streams.count((Stream*)stream) || !events.count((Event*)event)) return InvalidHandle;
    if (is_captured()) return CaptureUnsupported;  // as for cuEventRecord
    if (flags) return InvalidValue;
    // the event as it is now, whatever it is recorded for later
    const Event then = *(Event*)event;
    if (then.stream)
        ask((Stream*)stream, [then] {
            if (streams.count(then.stream)) work(then.stream, then.recorded);
        });
    return Success;
}

API cuEventCreate(void** event, unsigned flags) {
    BEGIN_IN_CONTEXT(cuEventCreate)
    Event* made = new Event;
    made->timing = !(flags & 2);
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
    if (!events.count((Event*)event) || !streams.count((Stream*)stream)) return InvalidHandle;
    if (is_captured()) return CaptureUnsupported;  // not by the driver, but nobody asks for it
    Event* one = (Event*)event;
    one->marked = true;
    one->stream = (Stream*)stream;
    if (one->timing) ask(one->stream, [one] { if (events.count(one)) one->milliseconds = now(); });
    one->recorded = one->stream->asked;
    return Success;
}

API cuEventElapsedTime(float* milliseconds, void* first, void* last) {
    BEGIN_IN_CONTEXT(cuEventElapsedTime)
    const Event *from = (Event*)first, *to = (Event*)last;
    for (const Event* one : {from, to}) {
        if (!events.count((Event*)one) || !one->timing || !one->marked) return InvalidHandle;
        if (one->stream && one->recorded > one->stream->done) return NotReady;
    }
    *milliseconds = (float)(to->milliseconds - from->milliseconds);
    return Success;
}

API cuStreamBeginCapture_v2(void* stream, int mode) {
    BEGIN_IN_CONTEXT(cuStreamBeginCapture_v2)
    if (!streams.count((Stream*)stream)) return InvalidHandle;
    if (capture || mode < 0 || mode > 2) return InvalidValue;
    captured = (Stream*)stream;
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
    if (!ready_graphs.count((Graph*)ready) || !streams.count((Stream*)stream)) return InvalidHandle;
    if (is_captured()) return CaptureUnsupported;  // as above
    for (const auto& task : ((Graph*)ready)->tasks) ask((Stream*)stream, task);
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
    const Event then = *(Event*)event;
    return then.stream ? work(then.stream, then.recorded) : broken;
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
    if (!function || !streams.count((Stream*)stream) || extra) return InvalidHandle;
    const emulated::Registered& kernel = *(const emulated::Registered*)function;
    if (!grid_x || !grid_y || !grid_z || grid_x > 0x7fffffff || grid_y > 65535 || grid_z > 65535) return InvalidValue;
    // kernels are written for one size of groups: less would leave work undone
    if (block_x != kernel.threads || block_y != 1 || block_z != 1 || shared) return LaunchOutOfResources;
    // the parameters are copied now, as the driver does
    const std::shared_ptr<emulated::Call> call(kernel.call(parameters));
    const emulated::Index groups = {grid_x, grid_y, grid_z};
    ((Stream*)stream)->computes = true;
    ask((Stream*)stream, [&kernel, groups, call] {
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
