// The buffers of a kernel that reads stored weights, and where a matrix lies in them: kernels/cuda/weights.cuh.
READS(0, Codes, uint codes);
READS(0, Codes2, uvec2 codes_2);
READS(0, Codes4, uvec4 codes_4);
READS(1, Scales, float scales);

struct Weights {
    uint codes_at;    // where the matrix begins, in words
    uint scales_at;
    uint stride;      // words of a row's codes
    uint row_scales;  // scales of a row; of fp8, of a row of blocks
    uint group_size;  // of int4 in groups
};
