#version 450
/* set_rows.comp - encodes rows into pages of int-4: SET_ROWS on codes (format.md, "Uniform codes").
 *
 * A workgroup has one row of keys or of values of one kv head. The rows of a call are checked by a
 * first dispatch (push.check), and encoded by a second one if none was refused. So a call stores
 * all rows or none. Slots must differ. Rows share words with other tokens, so words are changed by
 * atomics. */
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_spirv_intrinsics : require
#include "exact.glsl"
#include "push.glsl"

ROUND_TO_NEAREST;

layout(local_size_x = 32) in;
layout(constant_id = 0) const uint HEAD_DIM = 128;

layout(binding = 0) readonly buffer RowsK { uint k_rows[]; }; /* bits of binary32 */
layout(binding = 1) readonly buffer RowsV { uint v_rows[]; };
layout(binding = 2) buffer Keys { uint keys[]; };
layout(binding = 3) buffer Values { uint values[]; };
layout(binding = 4) readonly buffer Slots { uint slots[]; };
layout(binding = 5) buffer Refused { uint refused; };

const uint TILES = (HEAD_DIM + 15u) / 16u;

bool is_value()
{
    return gl_WorkGroupID.z == 1u;
}

shared uint lows[32], highs[32];
shared uint numbers[16u * TILES], codes[16u * TILES];

/* Integers in the order of the numbers whose bits they come from; -0 lies below 0. */
uint ordered(uint bits)
{
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

uint bits_of(uint order)
{
    return (order & 0x80000000u) != 0u ? order & 0x7fffffffu : ~order;
}

void put(uint word, uint mask, uint bits)
{
    if (is_value()) {
        atomicAnd(values[word], ~mask);
        atomicOr(values[word], bits);
    } else {
        atomicAnd(keys[word], ~mask);
        atomicOr(keys[word], bits);
    }
}

void put_half(uint at, uint h)
{
    put(at / 2u, at % 2u == 0u ? 0xffffu : 0xffff0000u, at % 2u == 0u ? h : h << 16);
}

/* The codes of a key: a word has 4 channels of a token, and of the token 8 rows below it. */
void put_key(uint page, uint token)
{
    const uint r = token % 16u, shift = r < 8u ? 0u : 4u;

    for (uint i = gl_LocalInvocationIndex; i < 4u * TILES; i += 32u) {
        const uint c = 16u * (i / 4u) + 2u * (i % 4u);
        const uint bits = codes[c] | codes[c + 1u] << 16 | codes[c + 8u] << 8 | codes[c + 9u] << 24;
        const uint lane = 4u * (r % 8u) + i % 4u;
        put(page + 4u * (32u * (i / 4u) + lane) + token / 16u, 0x0f0f0f0fu << shift, bits << shift);
    }
}

/* The codes of a value: a byte of a word has channels r and r + 8 of a tile. */
void put_value(uint page, uint token)
{
    const uint c = token % 16u, shift = 8u * (c / 8u) + 16u * (c % 2u);

    for (uint i = gl_LocalInvocationIndex; i < 8u * TILES; i += 32u) {
        const uint tile = i / 8u, r = i % 8u, group = tile / 4u;
        const uint bits = codes[16u * tile + r] | codes[16u * tile + r + 8u] << 4;
        const uint lane = 4u * r + c % 8u / 2u, tiles = min(4u, TILES - 4u * group);
        const uint word = 512u * group + (32u * (token / 16u) + lane) * tiles + tile % 4u;
        put(page + word, 0xffu << shift, bits << shift);
    }
}

void main()
{
    const uint me = gl_LocalInvocationIndex, row = gl_WorkGroupID.x, head = gl_WorkGroupID.y;
    const uint from = (row * push.kv_heads + head) * HEAD_DIM;
    uint low = 0xffffffffu, high = 0u;
    bool bad = false;

    if (push.check == 0u && refused != 0u)
        return;
    for (uint j = me; j < HEAD_DIM; j += 32u) {
        const uint bits = is_value() ? v_rows[from + j] : k_rows[from + j];
        numbers[j] = bits;
        low = min(low, ordered(bits));
        high = max(high, ordered(bits));
        bad = bad || (bits & 0x7fffffffu) > HALF_MAX_BITS; /* NaN and infinity, too */
    }
    if (push.check != 0u) {
        if (bad)
            atomicOr(refused, 1u);
        return;
    }
    lows[me] = low;
    highs[me] = high;
    barrier();
    for (uint i = 0u; i < 32u; i++) {
        low = min(low, lows[i]);
        high = max(high, highs[i]);
    }
    const uint least = bits_of(low) == 0x80000000u ? 0u : bits_of(low); /* +0 instead of -0 */
    precise const float range = uintBitsToFloat(bits_of(high)) - uintBitsToFloat(least);
    const uint scale = to_half(divide_by_15(floatBitsToUint(range) & 0x7fffffffu));
    const uint zero = to_half(least);
    const float inverse = scale != 0u ? reciprocal(scale) : 0.0, offset = from_half(zero);
    for (uint j = me; j < 16u * TILES; j += 32u) {
        float level = 0.0;
        if (j < HEAD_DIM) {
            precise const float shifted = uintBitsToFloat(numbers[j]) - offset;
            precise const float scaled = shifted * inverse;
            level = clamp(roundEven(scaled), 0.0, 15.0);
        }
        codes[j] = uint(level);
    }
    barrier();
    const uint slot = slots[row], token = slot % 64u;
    const uint page_words = is_value() ? push.page_words.y : push.page_words.x;
    const uint page = (slot / 64u * push.kv_heads + head) * page_words;
    if (is_value())
        put_value(page, token);
    else
        put_key(page, token);
    if (me == 0u) {
        const uint scales = 2u * page + 256u * TILES; /* in fp16 numbers, behind the codes */
        put_half(scales + token, scale);
        put_half(scales + 64u + token, zero);
    }
}
