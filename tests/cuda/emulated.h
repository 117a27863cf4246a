// What kernels/cuda/*.cu are compiled with to run on the CPU: CUDA's names, and threads of a block that take turns.
//
// Every thread of a block is a fiber (emulated.cpp). It runs until it waits for others: at __syncthreads for its block, at an
// operation of warps for the 32 lanes of its warp. Emulated is what the kernels use, and no more.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <utility>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
// One block runs at a time, so that its shared memory can be static; all of it lies in a section of its own.
#define __shared__ static __attribute__((section("emulated_shared")))

#ifdef COLICONV_LISTING
// The preprocessor alone runs: what it leaves is looked through for kernels (tests/support/emulated_cuda.rs).
#define KERNEL(threads, name) emulated_kernel threads name ;
#else
#define KERNEL(threads, name) static void name
#endif
#define KERNEL_RESIDENT(threads, groups, name) KERNEL(threads, name)

namespace emulated {

struct Index {
    unsigned x, y, z;
};

// Of the thread that runs.
extern Index thread_index, block_index, block_size, grid_size;

// What the lanes of a warp do together.
enum class Together { Sum, Max, Words };

// Waits for all threads of the block.
void barrier();
// Waits for all lanes of the warp; gives the sum or the largest of all values.
float reduced(Together what, float value);
// Waits for all lanes of the warp; gives the words of all of them.
const uint32_t* words(uint32_t word);
// Waits for all lanes of the warp; c [16, 8] += a [16, 16] · b [16, 8] of bf16, as tensor cores lay them out.
void matrices(float* c, const uint32_t* a, const uint32_t* b);
// The same for sums [16, n] of the warp, as instructions of four warps lay them out; b in shared memory from `b` on, each column's 128
// bytes swizzled.
void wide_matrices(float* sums, unsigned n, const uint32_t* a, uintptr_t b, bool add);
// A copy of sixteen bytes that is made when its thread waits for it.
void copy_later(void* to, const void* from);
void copies_done();
// Shared memory of the size that the launch asked for; it ends at a page that nobody may touch.
extern void* launch_shared;
// Ends the launch with an error.
[[noreturn]] void trap(const char* message);

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

inline unsigned lane() { return thread_index.x % 32; }

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define blockDim emulated::block_size
#define gridDim emulated::grid_size

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};

inline float __int_as_float(int value) { return emulated::bits<float>(value); }
inline float __uint_as_float(unsigned value) { return emulated::bits<float>(value); }
inline int __float_as_int(float value) { return emulated::bits<int>(value); }
inline unsigned __float_as_uint(float value) { return emulated::bits<unsigned>(value); }

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Bytes of the eight of a and b, chosen by the lower three bits of four.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned choice) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) result |= (unsigned)(both >> 8 * (choice >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned b[2] = {b0, b1};
    emulated::matrices(c, a, b);
}
template <unsigned N>
struct Products {
    static void start(float (&sums)[N / 2], const unsigned (&a)[4], unsigned long long b, unsigned add) {
        emulated::wide_matrices(sums, N, a, (uintptr_t)b << 4, add != 0);
    }
};
// Products are done when they are started.
inline void products_begin() {}
inline void products_end() {}
inline void products_wait() {}
inline unsigned long long columns_at(const uint4* at) {
    if ((uintptr_t)at % 1024 != 0) emulated::trap("a matrix is not aligned to 1024 bytes");
    return (uintptr_t)at >> 4;
}
inline void copy_16(uint4* to, const uint4* from) { emulated::copy_later(to, from); }
inline void copies_end() {}
template <unsigned OPEN>
inline void copies_wait() {
    static_assert(OPEN == 0, "waiting for some copies is not emulated");
    emulated::copies_done();
}
inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
    unsigned result = 0;
    for (unsigned half = 0; half < 32; half += 16) {
        const auto of = [half](unsigned word) { return __uint_as_float(word >> half << 16); };
        const unsigned sum = __float_as_uint(fmaf(of(a), of(b), of(c)));
        // to the nearest, ties to even
        result |= (sum + 0x7fffu + (sum >> 16 & 1)) >> 16 << half;
    }
    return result;
}
inline unsigned masked(unsigned a, unsigned mask, unsigned set) { return (a & mask) | set; }
inline unsigned in_register(unsigned value) { return value; }
inline uint4 read_once(const unsigned* from) { return *(const uint4*)from; }
// One kernel runs after the other.
inline void fetch_ahead(const void*) {}
inline void wait_for_kernels_before() {}
inline void let_next_kernel_begin() {}
#define shared_memory ((uint4*)emulated::launch_shared)

inline void __syncthreads() { emulated::barrier(); }

// The bits of a tree of pairs 16 apart, then 8, 4, 2, 1: as __shfl_xor_sync adds them up.
inline float warp_sum(float value) { return emulated::reduced(emulated::Together::Sum, value); }
inline float warp_max(float value) { return emulated::reduced(emulated::Together::Max, value); }

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane) {
    if (mask != 0xffffffffu) emulated::trap("a shuffle of a part of a warp is not emulated");
    return emulated::bits<T>(emulated::words(emulated::bits<uint32_t>(value))[lane & 31]);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int apart) {
    return __shfl_sync(mask, value, (int)emulated::lane() ^ apart);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    const unsigned lane = emulated::lane();
    return __shfl_sync(mask, value, (int)(lane < by ? lane : lane - by));
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
    const unsigned lane = emulated::lane();
    return __shfl_sync(mask, value, (int)(lane + by > 31 ? lane : lane + by));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    if (mask != 0xffffffffu) emulated::trap("a ballot of a part of a warp is not emulated");
    const uint32_t* words = emulated::words(predicate != 0);
    unsigned all = 0;
    for (unsigned i = 0; i < 32; i++) all |= words[i] << i;
    return all;
}
inline void __syncwarp(unsigned = 0xffffffffu) { emulated::words(0); }

// Threads take turns: nobody comes between.
template <class T>
inline T atomicAdd(T* to, T value) {
    const T before = *to;
    *to = before + value;
    return before;
}

namespace emulated {

// A kernel with its arguments, to be called by every thread.
struct Call {
    virtual ~Call() = default;
    virtual void operator()() const = 0;
};

template <class... Arguments>
struct CallOf : Call {
    void (*function)(Arguments...);
    void* values[sizeof...(Arguments)];
    alignas(16) unsigned char bytes[1024];

    CallOf(void (*called)(Arguments...), void** parameters) : function(called) {
        static_assert((0 + ... + (sizeof(Arguments) + 15)) <= sizeof bytes, "more arguments than are emulated");
        const size_t sizes[] = {sizeof(Arguments)...};
        for (size_t i = 0, at = 0; i < sizeof...(Arguments); at += (sizes[i] + 15) / 16 * 16, i++)
            values[i] = memcpy(bytes + at, parameters[i], sizes[i]);
    }
    template <size_t... At>
    void with(std::index_sequence<At...>) const {
        function(*(Arguments*)values[At]...);
    }
    void operator()() const override { with(std::index_sequence_for<Arguments...>()); }
};

// Makes a kernel known.
struct Registered {
    const char* name;
    unsigned threads;
    Call* (*call)(void** parameters);
    const Registered* next;
    Registered(const char* its_name, unsigned its_threads, Call* (*its_call)(void**));
};

template <class... Arguments>
Call* call_of(void (*function)(Arguments...), void** parameters) {
    return new CallOf<Arguments...>(function, parameters);
}

}  // namespace emulated

#define EMULATED_REGISTER(threads, name) \
    static emulated::Registered registered_##name(#name, threads, [](void** p) { return emulated::call_of(name, p); });
