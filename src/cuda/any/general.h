/* general.h - the common parts of pages in the general form (codec/view.h, kvant_general_view):
 * numbers, sums, rotations, codes. general_decode.h and general_encode.h process rows.
 *
 * The same source is C and CUDA. A team of lanes works on a row. In CUDA the team is a warp; in C
 * it is one lane, and tests compare its bytes with the CPU's codecs. Between two barriers no lane
 * reads memory that another lane writes. All arithmetic is in single roundings and in the order of
 * format.md. */
#pragma once

#include "../../base/attributes.h"
#include "../general_view.h"
#include "../code_position.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>

KVANT_INLINE float general_add(float a, float b)
{
    return __fadd_rn(a, b);
}
KVANT_INLINE float general_sub(float a, float b)
{
    return __fsub_rn(a, b);
}
KVANT_INLINE float general_mul(float a, float b)
{
    return __fmul_rn(a, b);
}
KVANT_INLINE float general_div(float a, float b)
{
    return __fdiv_rn(a, b);
}
KVANT_INLINE float general_sqrt(float x)
{
    return __fsqrt_rn(x);
}
KVANT_INLINE float general_from_half(uint16_t x)
{
    return __half2float(__ushort_as_half(x));
}
KVANT_INLINE uint16_t general_to_half(float x)
{
    return __half_as_ushort(__float2half_rn(x));
}
KVANT_INLINE void general_meet(void)
{
    __syncwarp();
}
KVANT_INLINE float general_from_bits(uint32_t bits)
{
    return __uint_as_float(bits);
}
KVANT_INLINE uint32_t general_to_bits(float x)
{
    return __float_as_uint(x);
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
#include <math.h>

#include "../../base/half.h"

KVANT_INLINE float general_add(float a, float b)
{
    return a + b;
}
KVANT_INLINE float general_sub(float a, float b)
{
    return a - b;
}
KVANT_INLINE float general_mul(float a, float b)
{
    return a * b;
}
KVANT_INLINE float general_div(float a, float b)
{
    return a / b;
}
KVANT_INLINE float general_sqrt(float x)
{
    return sqrtf(x);
}
KVANT_INLINE float general_from_half(uint16_t x)
{
    return kvant_half_to_float(x);
}
KVANT_INLINE uint16_t general_to_half(float x)
{
    return kvant_half_from_float(x);
}
KVANT_INLINE void general_meet(void)
{
}
KVANT_INLINE float general_from_bits(uint32_t bits)
{
    return kvant_float_from_bits(bits);
}
KVANT_INLINE uint32_t general_to_bits(float x)
{
    return kvant_float_bits(x);
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

/* The numbers at an offset in the tables of the kv head. */
KVANT_INLINE const float *general_table(general_team team, const kvant_general *g, uint32_t place)
{
    return g->tables + (size_t)g->head_stride * (size_t)team.kv_head + place;
}

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

KVANT_INLINE float general_dot3(float a, float b, float c, float d, float e, float f)
{
    return general_add(general_add(general_mul(a, b), general_mul(c, d)), general_mul(e, f));
}

/* (a b + c d) + (e f + g h) of four numbers each */
KVANT_INLINE float general_dot4(const float *x, const float *w)
{
    return general_add(general_add(general_mul(x[0], w[0]), general_mul(x[1], w[1])),
                       general_add(general_mul(x[2], w[2]), general_mul(x[3], w[3])));
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

/* The sum of products of two rows; with b NULL, the sum of the numbers a. All lanes get the sum. */
KVANT_INLINE float general_sum(general_team team, float *sums, const float *a, const float *b,
                               int n)
{
    general_meet();
    for (int j = team.lane; j < 16; j += team.lanes) {
        float sum = 0;
        for (int i = j; i < n; i += 16)
            sum = general_add(sum, b ? general_mul(a[i], b[i]) : a[i]);
        sums[j] = sum;
    }
    general_meet();
    return general_tree(sums);
}

/* A dot product by one lane. */
KVANT_INLINE float general_own_dot(const float *a, const float *b, int n)
{
    float s[16] = { 0 };
    int at = 0;
    for (; at + 16 <= n; at += 16)
        unrolled_for (int i = 0; i < 16; i++)
            s[i] = general_add(s[i], general_mul(a[at + i], b[at + i]));
    unrolled_for (int i = 0; i < 16; i++)
        if (at + i < n)
            s[i] = general_add(s[i], general_mul(a[at + i], b[at + i]));
    return general_tree(s);
}

/* ---- rotations ---- */

KVANT_INLINE void general_hadamard(general_team team, float *x, int n, float scale)
{
    for (int distance = 1; distance < n; distance *= 2) {
        general_meet();
        for (int i = team.lane; i < n / 2; i += team.lanes) {
            const int at = 2 * i - (i & (distance - 1));
            const float p = x[at], q = x[at + distance];
            x[at] = general_add(p, q);
            x[at + distance] = general_sub(p, q);
        }
    }
    general_meet();
    for (int i = team.lane; i < n; i += team.lanes)
        x[i] = general_mul(x[i], scale);
    general_meet();
}

/* to = R from; to and from do not overlap. */
KVANT_INLINE void general_rotate(general_team team, const kvant_rotation_position *place,
                                 const float *tables, const float *from, float *to)
{
    const int n = (int)place->n;
    const float *numbers = tables + place->numbers;
    general_meet();
    for (int i = team.lane; i < n; i += team.lanes)
        to[i] = place->dense ? general_own_dot(numbers + (size_t)i * (size_t)n, from, n)
                             : general_mul(from[i], numbers[i]);
    if (place->dense)
        general_meet();
    else
        general_hadamard(team, to, n, place->scale);
}

/* Sum over j of weights[j] rows[j][i], in this order, for rows of n numbers. Loads sixteen numbers
 * at a time, because they come from device memory. */
KVANT_INLINE float general_combine(const float *rows, const float *weights, int n, int i)
{
    float sum = 0, x[16];
    for (int first = 0; first < n; first += 16) {
        unrolled_for (int j = 0; j < 16; j++)
            x[j] = first + j < n ? rows[(size_t)(first + j) * (size_t)n + (size_t)i] : 0;
        unrolled_for (int j = 0; j < 16; j++)
            sum = first + j < n ? general_add(sum, general_mul(weights[first + j], x[j])) : sum;
    }
    return sum;
}

/* to = R^T from; from is overwritten. */
KVANT_INLINE void general_rotate_back(general_team team, const kvant_rotation_position *place,
                                      const float *tables, float *from, float *to)
{
    const int n = (int)place->n;
    const float *numbers = tables + place->numbers;
    if (!place->dense)
        general_hadamard(team, from, n, place->scale);
    general_meet();
    for (int i = team.lane; i < n; i += team.lanes)
        to[i] =
            place->dense ? general_combine(numbers, from, n, i) : general_mul(from[i], numbers[i]);
    general_meet();
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

/* The same for chunk codes. */
KVANT_INLINE uint32_t general_get_chunk(const kvant_general *g, const uint32_t *words, int n_chunks,
                                        int bits, int token, int chunk)
{
    uint32_t code = 0;
    for (int p = 16, shift = 0; p > 0; p /= 2) {
        if (!(bits & p))
            continue;
        const kvant_code_position at = chunk_place(p, n_chunks, g->keys, token, chunk);
        code |= (words[at.word] >> at.bit & ((1u << p) - 1)) << shift;
        words += chunk_plane_words(p, n_chunks, g->keys);
        shift += p;
    }
    return code;
}

KVANT_INLINE void general_put_chunk(const kvant_general *g, uint32_t *words, int n_chunks, int bits,
                                    int token, int chunk, uint32_t code)
{
    for (int p = 16, shift = 0; p > 0; p /= 2) {
        if (!(bits & p))
            continue;
        const kvant_code_position at = chunk_place(p, n_chunks, g->keys, token, chunk);
        const uint32_t ones = (1u << p) - 1;
        general_put_bits(words + at.word, (code >> shift & ones) << at.bit, ones << at.bit);
        words += chunk_plane_words(p, n_chunks, g->keys);
        shift += p;
    }
}

KVANT_INLINE int general_chunk_bits(const kvant_general *g)
{
    return (int)(g->view.chunks.index_bits + g->view.chunks.length_bits);
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
