/* pack.cuh - from nibbles of tokens to words of a page (format.md, "Code plane").
 *
 * A word has two halves of four fields for each of its tiles. Four words of nibbles, one per field,
 * hold the fields of four tiles in a row. Transposed as a 4 x 4 matrix they are the words of four
 * tiles, in both halves at once. Planes of fewer bits are squeezed out of these words.
 *
 * Tokens share words. A thread block that has all codes of a word stores the word whole. Otherwise
 * it flips its own bits with an atomic, because other tokens of the word may be written at the same
 * time. */
#pragma once

#include "encode.cuh"

namespace kvant
{

constexpr uint8_t NONE = 255;

/* The token of the chunk at each place of the page that is being written; NONE: there is none. */
struct PageTokens {
    alignas(2) uint8_t at[PAGE_TOKENS];
};

/* The source and the destination of a plane's codes. */
struct Plane {
    int bits, nibbles, shift, first_word, row_tiles, column_tiles;
};

KVANT_INLINE Plane plane_of(const kvant_cuda_params &codec, int i)
{
    int d = codec.head_dim / 16, rows = codec.role == KVANT_ROLE_K ? 4 : d,
        columns = codec.role == KVANT_ROLE_K ? d : 4;
    int shift = 0, first_word = 0;
    for (int before = 0; before < i; before++) {
        shift += plane_bits(codec.bits, before);
        first_word += plane_words(plane_bits(codec.bits, before), rows, columns);
    }
    return Plane{ plane_bits(codec.bits, i), shift / 4, shift % 4, first_word, rows, columns };
}

/* Flips the bits of *word under mask that differ from bits. No other thread writes these bits. */
KVANT_INLINE void put_bits(uint32_t *word, uint32_t bits, uint32_t mask)
{
    if (mask == FULL)
        *word = bits;
    else if (mask)
        atomicXor(word, (*word ^ bits) & mask);
}

KVANT_INLINE void transpose_nibbles(uint32_t (&words)[4], const uint32_t (&fields)[4])
{
    unrolled_for (int i = 0; i < 2; i++) {
        uint32_t even = prmt(fields[0], fields[2], i ? 0x7351 : 0x6240),
                 odd = prmt(fields[1], fields[3], i ? 0x7351 : 0x6240);
        words[2 * i] = bit_select<0x0f0f0f0fu>(even, odd << 4);
        words[2 * i + 1] = bit_select<0x0f0f0f0fu>(even >> 4, odd);
    }
}

/* Moves BITS bits of each nibble side by side to the low end of each half. */
template <int BITS> KVANT_INLINE uint32_t squeeze(uint32_t word, int shift)
{
    if (BITS == 4)
        return word;
    if (BITS == 2) {
        word = word >> shift & 0x33333333u;
        word = (word | word >> 2) & 0x0f0f0f0fu;
        return (word | word >> 4) & 0x00ff00ffu;
    }
    word = word >> shift & 0x11111111u;
    word = (word | word >> 3) & 0x03030303u;
    return (word | word >> 6) & 0x000f000fu;
}

KVANT_INLINE int usable(int token)
{
    return min(token,
               /* for NONE any row may be read, because the mask drops its codes */
               PAGE_TOKENS - 1);
}

/* For keys, whose matrix rows are tokens. A thread has tokens r and r + 8 of a tile, two channels
 * and their neighbours 8 further, in four tiles of channels. */
template <int D, int BITS>
KVANT_INLINE void write_keys(const uint32_t *nibbles, const PageTokens &tokens, int shift,
                             uint32_t *page, uint32_t at)
{
    constexpr int TILES = D / 16, IN_WORD = 4 / BITS;
    const int rt = at % 4, lane = at / 4 % 32, group = at / 128;
    const int a = tokens.at[16 * rt + lane / 4], b = tokens.at[16 * rt + lane / 4 + 8];
    const uint32_t present = (a == NONE ? 0 : 0x0f0f0f0fu) | (b == NONE ? 0 : 0xf0f0f0f0u);
    const uint32_t *from_a = nibbles + Nibbles<D>::at(usable(a)) + 8 * group + lane % 4;
    const uint32_t *from_b = nibbles + Nibbles<D>::at(usable(b)) + 8 * group + lane % 4;
    uint32_t fields[4] = { from_a[0], from_b[0], from_a[4], from_b[4] }, words[4];
    transpose_nibbles(words, fields);
    unrolled_for (int first = 0; first < 4; first += IN_WORD) {
        if (TILES % 4 != 0 && 4 * group + first >= TILES)
            break;
        uint32_t bits = 0, mask = 0;
        unrolled_for (int i = 0; i < IN_WORD; i++)
            if (TILES % 4 == 0 ||
                4 * group + first + i < TILES) { /* fields beyond the last tile are not changed */
                bits |= squeeze<BITS>(words[first + i], shift) << 4 * BITS * i;
                mask |= squeeze<BITS>(present, 0) << 4 * BITS * i;
            }
        put_bits(page + (32 * ((4 * group + first) / IN_WORD) + lane) * 4 + rt, bits, mask);
    }
}

/* For values, whose matrix columns are tokens. A thread has channels r and r + 8 of four
 * consecutive tiles, and four tokens of each tile of tokens in the word. */
template <int D, int BITS>
KVANT_INLINE void write_values(const uint32_t *nibbles, const PageTokens &tokens, int shift,
                               uint32_t *page, uint32_t at)
{
    constexpr int TILES = D / 16, IN_WORD = 4 / BITS, UNITS = BITS;
    const int lane = at % 32, unit = at / 32 % UNITS, group = at / (32 * UNITS),
              in_group = min(4, TILES - 4 * group);
    const uint32_t half = lane & 4 ? 0x7632 : 0x5410; /* whether the channel is odd */
    uint32_t bits[4] = {}, mask = 0;
    unrolled_for (int i = 0; i < IN_WORD; i++) {
        uint32_t fields[4], words[4], present = 0;
        unrolled_for (int far = 0; far < 2; far++) {
            const int column = 16 * (unit * IN_WORD + i) + 2 * (lane % 4) + 8 * far;
            const int pair = *reinterpret_cast<const uint16_t *>(tokens.at + column),
                      a = pair & 255, b = pair >> 8;
            const uint32_t *from_a = nibbles + Nibbles<D>::at(usable(a)) + 8 * group + lane / 8;
            const uint32_t *from_b = nibbles + Nibbles<D>::at(usable(b)) + 8 * group + lane / 8;
            fields[2 * far] = prmt(from_a[0], from_b[0], half);
            fields[2 * far + 1] = prmt(from_a[4], from_b[4], half);
            present |= ((a == NONE ? 0 : 0x000000ffu) | (b == NONE ? 0 : 0x00ff0000u)) << 8 * far;
        }
        transpose_nibbles(words, fields);
        mask |= squeeze<BITS>(present, 0) << 4 * BITS * i;
        unrolled_for (int k = 0; k < 4; k++)
            bits[k] |= squeeze<BITS>(words[k], shift) << 4 * BITS * i;
    }
    uint32_t *to = page + 128 * group * UNITS + (32 * unit + lane) * in_group;
    if (mask == FULL && in_group == 4) {
        *reinterpret_cast<uint4 *>(to) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        return;
    }
    unrolled_for (int k = 0; k < 4; k++)
        if (k < in_group)
            put_bits(to + k, bits[k], mask);
}

template <int D, int BITS>
KVANT_INLINE void write_plane(const Nibbles<D> &nibbles, const PageTokens &tokens,
                              const Plane &plane, bool keys, uint32_t *words)
{
    constexpr int GROUPS = Nibbles<D>::GROUPS;
    const uint32_t *from = nibbles.words[plane.nibbles];
    if (keys)
        for (uint32_t at = threadIdx.x; at < 128 * GROUPS; at += blockDim.x)
            write_keys<D, BITS>(from, tokens, plane.shift, words, at);
    else
        for (uint32_t at = threadIdx.x; at < 32 * BITS * GROUPS; at += blockDim.x)
            write_values<D, BITS>(from, tokens, plane.shift, words, at);
}

/* All threads of the block write the chunk's codes of one page. */
template <int D>
KVANT_INLINE void write_codes(const kvant_cuda_params &codec, const Nibbles<D> &nibbles,
                              const PageTokens &tokens, uint32_t *page)
{
    const bool keys = codec.role == KVANT_ROLE_K;
    for (int i = 0; i < PLANES && plane_bits(codec.bits, i); i++) {
        Plane plane = plane_of(codec, i);
        uint32_t *words = page + plane.first_word;
        switch (plane.bits) {
        case 1: write_plane<D, 1>(nibbles, tokens, plane, keys, words); break;
        case 2: write_plane<D, 2>(nibbles, tokens, plane, keys, words); break;
        default: write_plane<D, 4>(nibbles, tokens, plane, keys, words); break;
        }
    }
}

/* A warp writes one token code by code. */
template <int D>
KVANT_INLINE void write_token(const kvant_cuda_params &codec, const Nibbles<D> &nibbles, int token,
                              int at, uint32_t *page, int lane)
{
    const bool keys = codec.role == KVANT_ROLE_K;
    for (int i = 0; i < PLANES && plane_bits(codec.bits, i); i++) {
        Plane plane = plane_of(codec, i);
        const uint16_t *from = reinterpret_cast<const uint16_t *>(nibbles.words[plane.nibbles] +
                                                                  Nibbles<D>::at(token));
        uint32_t ones = (1u << plane.bits) - 1;
        for (int channel = lane; channel < D; channel += 32) {
            Place where = place(plane.bits, plane.row_tiles, plane.column_tiles,
                                keys ? at : channel, keys ? channel : at);
            uint32_t tiles = from[channel / 64 * 16 + channel % 16];
            uint32_t code = tiles >> (channel / 16 % 4 * 4 + plane.shift) & ones;
            put_bits(page + plane.first_word + where.word, code << where.bit, ones << where.bit);
        }
    }
}

} // namespace kvant
