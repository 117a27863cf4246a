// What all kernels share: sizes, how buffers and constants are declared, sums over 32 threads, the exponential.
//
// A kernel's buffers and constants stand in the order of its CUDA source in kernels/cuda, where its formula is; so do its
// steps, and but for products the order of its sums. A `warp` is 32 threads of a group, a `lane` one of them, whatever the device's
// subgroups are. With SUBGROUPS, which have to be full, lanes of a subgroup are added in registers, else all in shared memory.
//
// NaN is told by bits: a device need not keep to x ≠ x. Products and sums that round once are written as fma.
#extension GL_EXT_control_flow_attributes : require
#ifdef SUBGROUPS
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

layout(local_size_x = 256) in;

// Rows of x that a group takes at a time.
layout(constant_id = 0) const uint ROWS = 1;

#define READS(at, block, values) layout(std430, set = 0, binding = at) readonly buffer block { values[]; }
#define WRITES(at, block, values) layout(std430, set = 0, binding = at) buffer block { values[]; }
#define CONSTANTS layout(push_constant, std430) uniform Constants

const uint LANES = 32;
const uint WARPS = 8;
#define INFINITE uintBitsToFloat(0x7f800000u)
#define NOT_A_NUMBER uintBitsToFloat(0x7fc00000u)

// This thread's number in its group.
#ifdef SUBGROUPS
#define THREAD (gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID)
#else
#define THREAD gl_LocalInvocationIndex
#endif

bool is_nan(float x) { return (floatBitsToUint(x) & 0x7fffffffu) > 0x7f800000u; }

bool is_finite(float x) { return (floatBitsToUint(x) & 0x7f800000u) != 0x7f800000u; }

// ⌈a / b⌉.
uint parts(uint a, uint b) { return (a + b - 1) / b; }

// e^x as in kernels/cuda/common.cuh.
float exponential(float x) {
    if (is_nan(x) || x >= 88.75) return is_nan(x) ? x : INFINITE;
    if (x < -104.0) return 0.0;
    const float k = roundEven(x * 1.44269504);
    precise float r = fma(k, -0.693359375, x);
    r = fma(k, 2.12194440e-4, r);
    precise float sum = 1.0 / 5040.0;
    sum = fma(sum, r, 1.0 / 720.0);
    sum = fma(sum, r, 1.0 / 120.0);
    sum = fma(sum, r, 1.0 / 24.0);
    sum = fma(sum, r, 1.0 / 6.0);
    sum = fma(sum, r, 0.5);
    sum = fma(sum, r, 1.0);
    sum = fma(sum, r, 1.0);
    const int half_k = int(k) / 2;
    return sum * uintBitsToFloat(uint(127 + half_k) << 23) * uintBitsToFloat(uint(127 + int(k) - half_k) << 23);
}

// 1 / (1 + e^−x).
float sigmoid(float x) { return 1.0 / (1.0 + exponential(-x)); }
