/* general.h - the common parts of pages in the general form (codec/view.h, kvant_general_view):
 * numbers and codes. general_decode.h and general_encode.h process rows of numbers and of uniform
 * codes, and papers/general_*.h all other rows.
 *
 * The same source is C and CUDA. A team of lanes works on a row. In CUDA the team is a warp; in C
 * it is one lane, and tests compare its bytes with the CPU's codecs. Between two barriers no lane
 * reads memory that another lane writes. All arithmetic is in single roundings and in the order of
 * format.md. */
#pragma once

#include "../../base/attributes.h"
#include "../general_view.h"
#include "../code_position.h"

/* A function with one expression on a GPU and another on the CPU. */
#if defined(__CUDACC__)
#include <cuda_fp16.h>

#define GENERAL_FUNCTION(type, name, arguments, on_gpu, on_cpu)                                    \
    KVANT_INLINE type name arguments                                                               \
    {                                                                                              \
        return on_gpu;                                                                             \
    }
#else
#include <math.h>

#include "../../base/half.h"

#define GENERAL_FUNCTION(type, name, arguments, on_gpu, on_cpu)                                    \
    KVANT_INLINE type name arguments                                                               \
    {                                                                                              \
        return on_cpu;                                                                             \
    }
#endif

GENERAL_FUNCTION(float, general_add, (float a, float b), __fadd_rn(a, b), a + b)
GENERAL_FUNCTION(float, general_sub, (float a, float b), __fsub_rn(a, b), a - b)
GENERAL_FUNCTION(float, general_mul, (float a, float b), __fmul_rn(a, b), (a * b))
GENERAL_FUNCTION(float, general_div, (float a, float b), __fdiv_rn(a, b), a / b)
GENERAL_FUNCTION(float, general_sqrt, (float x), __fsqrt_rn(x), sqrtf(x))
GENERAL_FUNCTION(float, general_from_half, (uint16_t x), __half2float(__ushort_as_half(x)),
                 kvant_half_to_float(x))
GENERAL_FUNCTION(uint16_t, general_to_half, (float x), __half_as_ushort(__float2half_rn(x)),
                 kvant_half_from_float(x))
GENERAL_FUNCTION(float, general_from_bits, (uint32_t bits), __uint_as_float(bits),
                 kvant_float_from_bits(bits))
GENERAL_FUNCTION(uint32_t, general_to_bits, (float x), __float_as_uint(x), kvant_float_bits(x))

#if defined(__CUDACC__)
KVANT_INLINE void general_meet(void)
{
    __syncwarp();
}
KVANT_INLINE int general_ones(uint32_t bits)
{
    return __popc(bits);
}
/* Writes bits of a word that is shared with tokens of other warps. */
KVANT_INLINE void general_put_bits(uint32_t *word, uint32_t bits, uint32_t mask)
{
    atomicXor(word, (*(volatile uint32_t *)word ^ bits) & mask);
}
#else
KVANT_INLINE void general_meet(void)
{
}
KVANT_INLINE int general_ones(uint32_t bits)
{
    int n = 0;
    for (; bits; bits &= bits - 1)
        n++;
    return n;
}
KVANT_INLINE void general_put_bits(uint32_t *word, uint32_t bits, uint32_t mask)
{
    *word = (*word & ~mask) | bits;
}
#endif

#define GENERAL_HALF_MAX 65504.0f
#define GENERAL_LARGEST 3.402823466e38f
#define GENERAL_TOKENS 64
/* Loads that a lane makes before a store. The compiler cannot move them past the store, which might
 * change the loaded numbers. */
#define GENERAL_AT_ONCE 4

typedef struct general_team {
    int lane, lanes, kv_head;
} general_team;

/* The memory that a team works in: room for a row in each of y, a, b and codes, and a number per
 * lane. Decoding needs no sums. */
typedef struct general_space {
    float *y, *a, *b;
    uint32_t *codes;
    float *sums; /* 16 numbers */
} general_space;

/* ---- numbers ---- */

KVANT_INLINE float general_round_to_half(float x)
{
    return general_from_half(general_to_half(x));
}

/* The 16 partial sums of format.md, "Numbers". */
KVANT_INLINE float general_tree(const float *sums)
{
    float s[16];
    unrolled_for (int i = 0; i < 16; i++)
        s[i] = sums[i];
    unrolled_for (int width = 8; width > 0; width /= 2)
        unrolled_for (int i = 0; i < width; i++)
            s[i] = general_add(s[i], s[i + width]);
    return s[0];
}

KVANT_INLINE bool general_fits(float x)
{
    return x <= GENERAL_HALF_MAX;
}

/* ---- codes ---- */

KVANT_INLINE int general_plane(int left)
{
    return left >= 4 ? 2 : left >= 2 ? 1 : 0;
}

/* A scalar code of `bits` bits, whose planes begin at words. */
KVANT_INLINE uint32_t general_get_code(const kvant_general *g, const uint32_t *words, int bits,
                                       int token, int channel)
{
    const int tiles = (int)g->head_dim / 16;
    uint32_t code = 0;
    for (int shift = 0, log; shift < bits; shift += 1 << log) {
        log = general_plane(bits - shift);
        const kvant_code_position at = code_place(log, g->keys, tiles, token, channel);
        code |= (words[at.word] >> at.bit & ((1u << (1 << log)) - 1)) << shift;
        words += code_plane_words(log, g->keys, tiles);
    }
    return code;
}

KVANT_INLINE void general_put_code(const kvant_general *g, uint32_t *words, int bits, int token,
                                   int channel, uint32_t code)
{
    const int tiles = (int)g->head_dim / 16;
    for (int shift = 0, log; shift < bits; shift += 1 << log) {
        log = general_plane(bits - shift);
        const kvant_code_position at = code_place(log, g->keys, tiles, token, channel);
        const uint32_t ones = (1u << (1 << log)) - 1;
        general_put_bits(words + at.word, (code >> shift & ones) << at.bit, ones << at.bit);
        words += code_plane_words(log, g->keys, tiles);
    }
}

/* The fp16 numbers at a byte of a page. */
KVANT_INLINE const uint16_t *general_halves(const void *page, uint32_t byte)
{
    return (const uint16_t *)(const void *)((const uint8_t *)page + byte);
}

KVANT_INLINE const uint32_t *general_words(const void *page, uint32_t byte)
{
    return (const uint32_t *)(const void *)((const uint8_t *)page + byte);
}

/* The numbers of a group, `stride` apart, over channels or tokens. Numbers from `there` on count as
 * copies of the first. */
typedef struct general_run {
    const float *numbers;
    const uint16_t *halves; /* fp16 numbers instead of floats, or NULL */
    int stride, there;
} general_run;

KVANT_INLINE float general_at(const general_run *x, int i)
{
    const size_t at = i < x->there ? (size_t)i * (size_t)x->stride : 0;
    return x->halves ? general_from_half(x->halves[at]) : x->numbers[at];
}
