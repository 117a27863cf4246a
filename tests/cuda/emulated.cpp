// Threads of a block as fibers: started by ucontext, switched by _setjmp and _longjmp, which ask nothing of the system.
#include "emulated.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "launch.h"

// The section of shared memory, where the linker says that it lies.
extern "C" char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));

namespace emulated {

Index thread_index, block_index, block_size, grid_size;
void* launch_shared;

namespace {

const unsigned MOST = 1024;
const size_t STACK = 64 << 10;

enum class State { Runs, AtBarrier, InWarp, Done };

struct Fiber {
    jmp_buf at;
    State state;
};

struct Warp {
    unsigned arrived;
    Together what;
    uint32_t in[32], out[32];
    float result;
    // What the lanes bring for a product of matrices: of two, since one may begin while others still read of the one before.
    uint32_t a[2][32][4], b[2][32][2];
    unsigned turn[32];
};

// Copies of a thread that it has not waited for.
struct Copies {
    unsigned count;
    void* to[32];
    const void* from[32];
};

Fiber fibers[MOST];
Copies copies[MOST];
Warp warps[MOST / 32];
unsigned started, active, current, at_barrier, done;
bool backwards;
char* stacks;
const Call* call;
jmp_buf back;
ucontext_t before;
volatile sig_atomic_t running;
pthread_t owner;
char message[256];

// How a block ended, as a value of _longjmp.
enum End { Finished = 1, Trapped = 2, Segment = 3, Misaligned = 4 };

void next();

void body() {
    const unsigned self = current;
    for (;;) {
        thread_index = {self, 0, 0};
        (*call)();
        fibers[self].state = State::Done;
        done++;
        next();
    }
}

// Goes on with a thread; returns when it is this one's turn again.
void go_to(unsigned to) {
    const unsigned self = current;
    if (to == self && fibers[to].state == State::Runs) return;
    if (_setjmp(fibers[self].at)) {
        thread_index = {self, 0, 0};
        return;
    }
    current = to;
    _longjmp(fibers[to].at, 1);
}

// Goes on with the next thread that can.
void next() {
    for (unsigned i = 1; i <= active; i++) {
        const unsigned to = (current + (backwards ? active - i : i)) % active;
        if (fibers[to].state == State::Runs) return go_to(to);
    }
    if (done == active) {
        if (!_setjmp(fibers[current].at)) _longjmp(back, Finished);
        return;  // the next block
    }
    if (at_barrier == active) {
        at_barrier = 0;
        for (unsigned i = 0; i < active; i++) fibers[i].state = State::Runs;
        return go_to(backwards ? active - 1 : 0);
    }
    unsigned in_warp = active - at_barrier - done;
    snprintf(message, sizeof message, "of %u threads %u wait at a barrier, %u for their warp, %u have ended", active,
             at_barrier, in_warp, done);
    _longjmp(back, Trapped);
}

uint32_t as_word(float value) { return bits<uint32_t>(value); }
float as_float(uint32_t value) { return bits<float>(value); }

// The larger; of zeros the positive one, of a number and NaN the number.
float larger(float a, float b) {
    if (a == 0 && b == 0) return signbit(a) ? b : a;
    return fmaxf(a, b);
}

void complete(Warp& warp) {
    memcpy(warp.out, warp.in, sizeof warp.out);
    if (warp.what == Together::Words) return;
    float values[32];
    for (unsigned i = 0; i < 32; i++) values[i] = as_float(warp.in[i]);
    for (unsigned apart = 16; apart > 0; apart /= 2)
        for (unsigned i = 0; i < apart; i++)
            values[i] = warp.what == Together::Sum ? values[i] + values[i + apart] : larger(values[i], values[i + apart]);
    warp.result = values[0];
}

Warp& together(Together what, uint32_t word) {
    const unsigned self = current;
    Warp& warp = warps[self / 32];
    if (warp.arrived == 0) warp.what = what;
    if (warp.what != what) trap("lanes of a warp do different things together");
    warp.in[self % 32] = word;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        complete(warp);
        const unsigned first = self / 32 * 32;
        for (unsigned i = first; i < first + 32; i++) fibers[i].state = State::Runs;
    } else {
        fibers[self].state = State::InWarp;
        next();
    }
    return warp;
}

// The first time a thread runs, on its own stack.
void start(unsigned thread) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + thread * STACK;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, [] {
        // back at once: from here on it is there to be switched to
        if (!_setjmp(fibers[current].at)) setcontext(&before);
        body();
    }, 0);
    current = thread;
    swapcontext(&before, &context);
}

void on_signal(int signal, siginfo_t*, void*) {
    if (running && pthread_equal(owner, pthread_self())) _longjmp(back, signal == SIGILL ? Misaligned : Segment);
    // not of a kernel: as if nobody had handled it
    ::signal(signal, SIG_DFL);
    raise(signal);
}

const char* run_block(int* code) {
    memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
    memset(warps, 0, sizeof warps);
    at_barrier = done = 0;
    for (unsigned i = 0; i < active; i++) fibers[i].state = State::Runs, copies[i].count = 0;
    const int end = _setjmp(back);
    if (end == 0) {
        owner = pthread_self();
        running = 1;
        current = backwards ? active - 1 : 0;
        _longjmp(fibers[current].at, 1);
    }
    running = 0;
    if (end == Finished) return nullptr;
    // the threads are in the middle of something: they begin anew
    started = 0;
    if (end == Trapped) {
        *code = 719;
        return message;
    }
    sigset_t both;
    sigemptyset(&both);
    sigaddset(&both, SIGSEGV), sigaddset(&both, SIGBUS), sigaddset(&both, SIGILL);
    pthread_sigmask(SIG_UNBLOCK, &both, nullptr);
    *code = end == Misaligned ? 716 : 700;
    snprintf(message, sizeof message, "thread %u of block (%u, %u, %u): %s", current, block_index.x, block_index.y,
             block_index.z, end == Misaligned ? "misaligned, or outside of an array" : "outside of every buffer");
    return message;
}

}  // namespace

void barrier() {
    fibers[current].state = State::AtBarrier;
    at_barrier++;
    next();
}

float reduced(Together what, float value) { return together(what, as_word(value)).result; }
const uint32_t* words(uint32_t word) { return together(Together::Words, word).out; }

void matrices(float* c, const uint32_t* a, const uint32_t* b) {
    const unsigned lane = current % 32;
    Warp& warp = warps[current / 32];
    const unsigned turn = warp.turn[lane]++ % 2;
    memcpy(warp.a[turn][lane], a, sizeof warp.a[turn][lane]);
    memcpy(warp.b[turn][lane], b, sizeof warp.b[turn][lane]);
    words(0);
    const auto half = [](uint32_t word, unsigned high) { return (double)as_float(word >> 16 * high << 16); };
    for (unsigned q = 0; q < 4; q++) {
        const unsigned row = lane / 4 + 8 * (q / 2), column = 2 * (lane % 4) + q % 2;
        double sum = c[q];
        for (unsigned k = 0; k < 16; k++) {
            const unsigned of_four = k % 8 / 2;
            const uint32_t from_a = warp.a[turn][4 * (row % 8) + of_four][row / 8 + 2 * (k / 8)];
            const uint32_t from_b = warp.b[turn][4 * column + of_four][k / 8];
            sum += half(from_a, k % 2) * half(from_b, k % 2);
        }
        c[q] = (float)sum;
    }
}

void wide_matrices(float* sums, unsigned n, const uint32_t* a, uintptr_t b, bool add) {
    const unsigned lane = current % 32;
    Warp& warp = warps[current / 32];
    const unsigned turn = warp.turn[lane]++ % 2;
    memcpy(warp.a[turn][lane], a, sizeof warp.a[turn][lane]);
    words(0);
    double rows[2][16];
    for (unsigned i = 0; i < 2; i++)
        for (unsigned k = 0; k < 16; k++) {
            const uint32_t word = warp.a[turn][4 * (lane / 4) + k % 8 / 2][i + 2 * (k / 8)];
            rows[i][k] = as_float(word >> 16 * (k % 2) << 16);
        }
    for (unsigned j = 0; j < n / 4; j++) {
        const unsigned column = 8 * (j / 2) + 2 * (lane % 4) + j % 2;
        double b_of[16];
        for (unsigned part = 0; part < 2; part++) {
            const uintptr_t straight = b + 128 * column + 16 * part;
            const uint16_t* eight = (const uint16_t*)(straight ^ (straight >> 7 & 7) << 4);
            for (unsigned k = 0; k < 8; k++) b_of[8 * part + k] = as_float((uint32_t)eight[k] << 16);
        }
        for (unsigned i = 0; i < 2; i++) {
            float& to = sums[4 * (j / 2) + 2 * i + j % 2];
            double sum = add ? to : 0.0f;
            for (unsigned k = 0; k < 16; k++) sum += rows[i][k] * b_of[k];
            to = (float)sum;
        }
    }
}

void copy_later(void* to, const void* from) {
    Copies& own = copies[current];
    if (own.count == 32) trap("more copies at a time than are emulated");
    own.to[own.count] = to, own.from[own.count] = from;
    own.count++;
}

void copies_done() {
    Copies& own = copies[current];
    for (unsigned i = 0; i < own.count; i++) *(uint4*)own.to[i] = *(const uint4*)own.from[i];
    own.count = 0;
}

void trap(const char* why) {
    snprintf(message, sizeof message, "%s", why);
    _longjmp(back, Trapped);
}

int run(const Registered& kernel, const Index& groups, unsigned shared, const Call& of_kernel, const char** why) {
    struct sigaction action = {}, old[3];
    const int signals[3] = {SIGSEGV, SIGBUS, SIGILL};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; i++) sigaction(signals[i], &action, &old[i]);
    if (!stacks) {
        void* memory = mmap(nullptr, MOST * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        stacks = (char*)memory;
    }
    const char* order = getenv("EMULATED_CUDA_ORDER");
    backwards = order && !strcmp(order, "backwards");
    call = &of_kernel;
    const size_t page = 4096, kept = (shared + page - 1) / page * page;
    char* mapped = (char*)mmap(nullptr, kept + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED || mprotect(mapped + kept, page, PROT_NONE)) abort();
    launch_shared = mapped + kept - (shared + 15) / 16 * 16;
    active = kernel.threads;
    block_size = {active, 1, 1};
    grid_size = groups;
    int code = 0;
    *why = nullptr;
    for (unsigned z = 0; z < groups.z && !*why; z++)
        for (unsigned y = 0; y < groups.y && !*why; y++)
            for (unsigned x = 0; x < groups.x && !*why; x++) {
                for (; started < active; started++) start(started);
                block_index = {x, y, z};
                memset(mapped, 0xff, kept);
                *why = run_block(&code);
            }
    munmap(mapped, kept + page);
    for (int i = 0; i < 3; i++) sigaction(signals[i], &old[i], nullptr);
    return code;
}

}  // namespace emulated
