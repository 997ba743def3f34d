/* token_words.cuh - writes the codes of one token to the words of its page, by a warp: lane l has
 * the codes of channels l, l + 32, ... */
#pragma once

#include "../layout.cuh"
#include "../ptx.cuh"
#include "../rotate.cuh"

namespace kvant
{

/* The words of a page that hold a token's codes (format.md, "Code plane"). Some lanes have codes in
 * the same words. For keys these are lanes l, l ^ 1, l ^ 8 and l ^ 9. For values these are lanes l
 * and l ^ 8. Each of these lanes changes one of FEW such words: the word of number `mine`. */
template <int D, bool KEYS> struct TokenWords {
    static constexpr int PER_LANE = Row<D>::PER_LANE, FEW = KEYS ? 4 : 2, TILES = D / 16,
                         WORDS = (PER_LANE + FEW - 1) / FEW * FEW;
    const int at, lane, mine;

    KVANT_INLINE TokenWords(int at_, int lane_)
        : at(at_), lane(lane_), mine(KEYS ? (lane_ & 1) | (lane_ >> 2 & 2) : lane_ >> 3 & 1)
    {
    }

    /* The place of number j in a plane of 2^log bits: place() of layout.cuh for the first channel
     * in the word. */
    KVANT_INLINE Place place_of(int log, int j) const
    {
        const int shift = 2 - log, ones = (1 << shift) - 1, tile = (lane >> 4) + 2 * j;
        if (KEYS)
            return Place{ (32 * (tile >> shift) + 4 * (at & 7) + (lane >> 1 & 3)) * 4 + (at >> 4),
                          (4 * (tile & ones) + (at >> 3 & 1)) << log };
        const int group = tile >> 2, in_group = TILES % 4 == 0 ? 4 : min(4, TILES - 4 * group),
                  column = at >> 4;
        return Place{ (128 * group << log) +
                          (32 * (column >> shift) + 4 * (lane & 7) + (at >> 1 & 3)) * in_group +
                          (tile & 3),
                      ((4 * (column & ones) + 2 * (at >> 3 & 1)) << log) + 16 * (at & 1) };
    }
    /* The words of a plane. */
    KVANT_INLINE int size_of(int log) const
    {
        return KEYS ? ((TILES << log) + 3) / 4 * 128 : TILES * 32 << log;
    }

    /* The binary logarithm of the bits of a code's next plane, when `left` bits are left: 4, 2 or 1
     * bits. */
    KVANT_INLINE static int log_of(int left)
    {
        return left >= 4 ? 2 : left >= 2 ? 1 : 0;
    }

    /* Prefetches the words. */
    KVANT_INLINE void request(const uint32_t *words, uint32_t bits) const
    {
#pragma unroll 1
        for (int left = (int)bits; left > 0;) {
            const int log = log_of(left);
            unrolled_for (int k = 0; k < PER_LANE; k += FEW)
                if (k + mine < PER_LANE)
                    prefetch_line(words + place_of(log, k + mine).word, 0);
            words += size_of(log);
            left -= 1 << log;
        }
    }

    /* Exchanges code bits, from `shift` on, between the lanes that share words of a plane. */
    KVANT_INLINE void exchange(uint32_t (&of)[WORDS], const uint32_t (&codes)[PER_LANE], int log,
                               int shift) const
    {
        const int far = lane >> 3 & 1,
                  own = KEYS ? (lane & 1) * 16 + (far << (log + 1)) : far << log;
        unrolled_for (int j = 0; j < PER_LANE; j++) {
            of[j] = (codes[j] >> shift & ((1u << (1 << log)) - 1)) << own;
            of[j] |= __shfl_xor_sync(FULL, of[j], 8);
            if (KEYS)
                of[j] |= __shfl_xor_sync(FULL, of[j], 1);
        }
    }

    /* Writes only this token's bits, because other tokens may be written at the same time. */
    KVANT_INLINE void put(uint32_t *words, const uint32_t (&codes)[PER_LANE], uint32_t bits,
                          bool store = true) const
    {
#pragma unroll 1
        for (int left = (int)bits, shift = 0; left > 0;) {
            const int log = log_of(left), p = 1 << log;
            const uint32_t ones = (1u << p) - 1,
                           mask = KEYS ? (ones | ones << 2 * p) * 0x10001u : ones | ones << p;
            uint32_t of[WORDS] = {};
            exchange(of, codes, log, shift);
            unrolled_for (int k = 0; k < PER_LANE; k += FEW) {
                if (k + mine >= PER_LANE)
                    continue;
                uint32_t own_word = mine & 1 ? of[k + 1] : of[k];
                if (KEYS)
                    own_word = mine & 2 ? mine & 1 ? of[k + 3] : of[k + 2] : own_word;
                const Place where = place_of(log, k + mine);
                if (store) {
                    atomicAnd(words + where.word, ~(mask << where.bit));
                    atomicOr(words + where.word, own_word << where.bit);
                }
            }
            words += size_of(log);
            shift += p;
            left -= p;
        }
    }
};

} // namespace kvant
