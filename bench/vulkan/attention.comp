#version 450
/* attention.comp - attention of one query token per sequence over int-4 pages of keys and values.
 *
 * A workgroup of one warp has a part of a sequence's pages, and all query heads of one kv head. It
 * multiplies codes: a token's score is scale x <q, codes> + zero x sum of q. Probabilities come
 * from an online softmax in powers of 2. combine.comp adds up the parts. head_dim is a multiple of
 * 64, so that 16 bytes hold codes of 4 tiles. */
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "exact.glsl"
#include "push.glsl"

layout(local_size_x = 32) in;
layout(constant_id = 0) const uint HEAD_DIM = 128;
layout(constant_id = 1) const uint HEADS = 4; /* query heads of a kv head */

layout(binding = 0) readonly buffer Queries { float q[]; };
layout(binding = 1) readonly buffer Keys { uvec4 keys[]; };
layout(binding = 2) readonly buffer Values { uvec4 values[]; };
layout(binding = 3) readonly buffer Table { uint table[]; };
layout(binding = 4) writeonly buffer Parts { float parts[]; };

const uint TILES = HEAD_DIM / 16u, GROUPS = HEAD_DIM / 64u;
const uint SUMS = 8u * GROUPS * HEADS; /* of a thread: rows r and r + 8 of all tiles, all heads */
const float LOG2_E = 1.44269504088896341;
/* Below every score: scores of finite fp16 numbers are above -2^48. */
const float LOWEST = -1e30;

/* A tile's codes lie in words in the order of matrix operands: thread 4 r + p has rows r and r + 8,
 * and columns 2 p, 2 p + 1, 2 p + 8, 2 p + 9. Here they are columns 0 to 3 of pair p. */
shared float query[HEAD_DIM * HEADS]; /* [tile][pair][column][head] */
shared float sums[4u * 64u * HEADS];  /* [pair][row][head] */
shared float weights[64u * HEADS];    /* [token][head] */
shared float lanes[32];

float sum_of_all(float x)
{
    if (gl_NumSubgroups == 1u)
        return subgroupAdd(x);
    lanes[gl_LocalInvocationIndex] = x;
    barrier();
    float sum = 0.0;
    for (uint i = 0u; i < 32u; i++)
        sum += lanes[i];
    barrier();
    return sum;
}

float max_of_all(float x)
{
    if (gl_NumSubgroups == 1u)
        return subgroupMax(x);
    lanes[gl_LocalInvocationIndex] = x;
    barrier();
    float most = lanes[0];
    for (uint i = 1u; i < 32u; i++)
        most = max(most, lanes[i]);
    barrier();
    return most;
}

/* A nibble where it stands in a word, as a number: 2^23 + nibble is a float whose lowest bits are
 * the nibble. Returns code x 16^(1 for a row from 8 on) x 256^(1 for a column from 8 on). */
float code(uint word, uint column, uint high_row)
{
    const uint half_word = column % 2u == 0u ? word : word >> 16;
    const uint mask = 15u << (4u * high_row + 8u * (column / 2u));

    return uintBitsToFloat(0x4b000000u | half_word & mask) - 8388608.0;
}

/* What code() multiplied a column by. */
float column_factor(uint column)
{
    return column >= 8u ? 1.0 / 256.0 : 1.0;
}

/* Half number `index` of a page's scales and zero points. */
float metadata(uvec4 eight, uint index)
{
    return from_half(eight[index / 2u % 4u] >> 16u * (index % 2u) & 0xffffu);
}

void load_query(uint kv_head, uint sequence, out float query_sum[HEADS])
{
    [[unroll]] for (uint g = 0u; g < HEADS; g++) {
        const uint from = ((sequence * push.kv_heads + kv_head) * HEADS + g) * HEAD_DIM;
        float sum = 0.0;
        for (uint j = gl_LocalInvocationIndex; j < HEAD_DIM; j += 32u) {
            const float x = q[from + j] * (push.scale * LOG2_E);
            const uint c = j % 16u, column = c % 2u + 2u * (c / 8u);
            query[((j / 16u * 4u + c % 8u / 2u) * 4u + column) * HEADS + g] = x * column_factor(c);
            sum += x;
        }
        query_sum[g] = sum_of_all(sum);
    }
}

/* <q, codes> of the page's tokens, a sum for each pair of columns, to sums. */
void multiply_keys(uint page)
{
    const uint me = gl_LocalInvocationIndex, pair = me % 4u;
    float sum[8u * HEADS];

    [[unroll]] for (uint i = 0u; i < 8u * HEADS; i++)
        sum[i] = 0.0;
    [[unroll]] for (uint tile = 0u; tile < TILES; tile++) {
        const uvec4 words = keys[page + 32u * tile + me];
        [[unroll]] for (uint column = 0u; column < 4u; column++) {
            const uint at = ((tile * 4u + pair) * 4u + column) * HEADS;
            [[unroll]] for (uint row = 0u; row < 8u; row++) {
                const float x = code(words[row / 2u], column, row % 2u);
                [[unroll]] for (uint g = 0u; g < HEADS; g++)
                    sum[row * HEADS + g] += x * query[at + g];
            }
        }
    }
    [[unroll]] for (uint row = 0u; row < 8u; row++) {
        const uint token = 16u * (row / 2u) + 8u * (row % 2u) + me / 4u;
        [[unroll]] for (uint g = 0u; g < HEADS; g++)
            sums[(64u * pair + token) * HEADS + g] =
                row % 2u == 0u ? sum[row * HEADS + g] : sum[row * HEADS + g] / 16.0;
    }
}

/* acc += weights x codes of the page's values. */
void multiply_values(uint page, inout float acc[SUMS])
{
    const uint me = gl_LocalInvocationIndex;

    [[unroll]] for (uint i = 0u; i < 4u * GROUPS; i++) {
        const uint tile = i % 4u, group = i / 4u;
        const uvec4 words = values[page + 128u * group + 32u * tile + me];
        [[unroll]] for (uint column = 0u; column < 4u; column++) {
            const uint token = 16u * tile + 2u * (me % 4u) + column % 2u + 8u * (column / 2u);
            [[unroll]] for (uint row = 0u; row < 8u; row++) {
                const float x = code(words[row / 2u], column, row % 2u);
                [[unroll]] for (uint g = 0u; g < HEADS; g++)
                    acc[(8u * group + row) * HEADS + g] += x * weights[token * HEADS + g];
            }
        }
    }
}

/* Adds up the sums of threads that have the same channels, and writes a part: head_dim numbers,
 * the largest exponent, and the sum of weights. */
void store(uint part, float acc[SUMS], float most[HEADS], float total[HEADS],
           float zeros[HEADS])
{
    const uint me = gl_LocalInvocationIndex;

    [[unroll]] for (uint group = 0u; group < GROUPS; group++) {
        barrier();
        [[unroll]] for (uint row = 0u; row < 8u; row++) {
            const uint channel = 16u * (row / 2u) + 8u * (row % 2u) + me / 4u;
            [[unroll]] for (uint g = 0u; g < HEADS; g++) {
                const float x = acc[(8u * group + row) * HEADS + g];
                sums[(64u * (me % 4u) + channel) * HEADS + g] = row % 2u == 0u ? x : x / 16.0;
            }
        }
        barrier();
        [[unroll]] for (uint g = 0u; g < HEADS; g++)
            for (uint c = me; c < 64u; c += 32u) {
                float x = zeros[g];
                for (uint pair = 0u; pair < 4u; pair++)
                    x += sums[(64u * pair + c) * HEADS + g];
                parts[(part + g * push.parts) * (HEAD_DIM + 2u) + 64u * group + c] = x;
            }
    }
    if (me == 0u)
        [[unroll]] for (uint g = 0u; g < HEADS; g++) {
            parts[(part + g * push.parts) * (HEAD_DIM + 2u) + HEAD_DIM] = most[g];
            parts[(part + g * push.parts) * (HEAD_DIM + 2u) + HEAD_DIM + 1u] = total[g];
        }
}

void main()
{
    const uint me = gl_LocalInvocationIndex;
    const uint kv_head = gl_WorkGroupID.x, part = gl_WorkGroupID.y, sequence = gl_WorkGroupID.z;
    const uint begin = part * push.part_pages, end = min(begin + push.part_pages, push.blocks);
    float query_sum[HEADS], most[HEADS], total[HEADS], zeros[HEADS];
    float acc[SUMS];

    load_query(kv_head, sequence, query_sum);
    [[unroll]] for (uint i = 0u; i < SUMS; i++)
        acc[i] = 0.0;
    [[unroll]] for (uint g = 0u; g < HEADS; g++) {
        most[g] = LOWEST;
        total[g] = zeros[g] = 0.0;
    }
    barrier();
    for (uint block = begin; block < end; block++) {
        const uint index = table[sequence * push.blocks + block] * push.kv_heads + kv_head;
        const uint k_page = index * (push.page_words.x / 4u),
                   v_page = index * (push.page_words.y / 4u);
        const uint scales = 32u * TILES; /* in units of 16 bytes, behind the codes */
        multiply_keys(k_page);
        barrier();
        float score[2u * HEADS], v_scale[2], v_zero[2];
        [[unroll]] for (uint i = 0u; i < 2u; i++) {
            const uint token = me + 32u * i, at = scales + token / 8u;
            const float k_scale = metadata(keys[k_page + at], token),
                        k_zero = metadata(keys[k_page + at + 8u], token);
            v_scale[i] = metadata(values[v_page + at], token);
            v_zero[i] = metadata(values[v_page + at + 8u], token);
            [[unroll]] for (uint g = 0u; g < HEADS; g++) {
                float sum = 0.0;
                [[unroll]] for (uint pair = 0u; pair < 4u; pair++)
                    sum += sums[(64u * pair + token) * HEADS + g];
                score[i * HEADS + g] = 64u * block + token < push.n_tokens
                                           ? k_scale * sum + k_zero * query_sum[g]
                                           : LOWEST;
            }
        }
        [[unroll]] for (uint g = 0u; g < HEADS; g++) {
            const float now = max(most[g], max_of_all(max(score[g], score[HEADS + g])));
            const float factor = exp2(most[g] - now);
            const float p0 = exp2(score[g] - now), p1 = exp2(score[HEADS + g] - now);
            most[g] = now;
            total[g] = total[g] * factor + (p0 + p1);
            zeros[g] = zeros[g] * factor + (p0 * v_zero[0] + p1 * v_zero[1]);
            weights[me * HEADS + g] = p0 * v_scale[0] * column_factor(me % 16u);
            weights[(me + 32u) * HEADS + g] = p1 * v_scale[1] * column_factor(me % 16u);
            [[unroll]] for (uint i = 0u; i < 8u * GROUPS; i++)
                acc[i * HEADS + g] *= factor;
        }
        barrier();
        multiply_values(v_page, acc);
    }
    [[unroll]] for (uint g = 0u; g < HEADS; g++) {
        total[g] = sum_of_all(total[g]);
        zeros[g] = sum_of_all(zeros[g]);
    }
    store(((sequence * push.kv_heads + kv_head) * HEADS) * push.parts + part, acc, most, total,
          zeros);
}
