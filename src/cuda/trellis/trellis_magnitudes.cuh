/* trellis_magnitudes.cuh - levels of two 4-bit trellis codes by one look-up of their magnitudes in
 * shared memory, with a copy of the table per bank, so that no two lanes meet.
 *
 * trellis_pairs.cuh looks up pairs of levels: 4096 words, one copy, in which 3.5 lanes meet in a
 * bank. Pairs of magnitudes are 1024 words: 32 copies are 128 KB. For a negative sign the bits of a
 * level's number are inverted (trellis_bytes.cuh), so both signs have one table. */
#pragma once

#include "trellis_bytes.cuh"
#include "trellis_pairs.cuh"

namespace kvant
{

constexpr int MAGNITUDES = 32, MAGNITUDE_BYTES = MAGNITUDES * MAGNITUDES * 128;

struct MagnitudeTable {
    const uint8_t *own; /* the lane's copy */
    uint32_t shift1, shift2, shift4;

    /* of: bytes of numbers below 32. WEIGHTS: which two are meant. */
    template <uint32_t WEIGHTS> KVANT_INLINE uint32_t at(uint32_t of) const
    {
        return *reinterpret_cast<const uint32_t *>(own + 128 * __dp4a(of, WEIGHTS, 0u));
    }
};

KVANT_INLINE MagnitudeTable magnitude_table(const uint8_t *table, uint32_t one, int lane)
{
    return MagnitudeTable{ table + 4 * lane, one << 31, one << 30, one << 28 };
}

template <class C> struct Unbiased : C {
    static constexpr bool BIASED = false;
};

template <class C>
KVANT_INLINE void fill_magnitudes(uint8_t *table, const uint32_t (&magnitudes)[KVANT_CUDA_TABLE_WORDS])
{
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < 8 * MAGNITUDES * MAGNITUDES; i += blockDim.x) {
        const uint32_t x = half_of_level<Unbiased<C>>(magnitudes, MAGNITUDES + i / 8 % MAGNITUDES) |
                           half_of_level<Unbiased<C>>(magnitudes, MAGNITUDES + i / 8 / MAGNITUDES) << 16;
        reinterpret_cast<uint4 *>(table)[i] = make_uint4(x, x, x, x);
    }
}

/* Numbers with the signs of codes, whose highest bits are those of signs: 0 is minus. */
KVANT_INLINE uint32_t with_signs(uint32_t magnitudes, uint32_t signs)
{
    return magnitudes ^ (~signs & 0x80008000u);
}

/* As pair_operands4, without a bias. */
template <int M, class At, class F>
KVANT_INLINE void magnitude_operands4(const uint32_t (&w)[4], const At &at, const MagnitudeTable &table, F &&use)
{
    uint32_t number[4];
    numbers_of_codes<M>(w, at, table, number);
    unrolled_for (int j = 0; j < 4; j++) {
        /* bit 4 of a number is bit 2 of the code, inverted where the sign is 0 */
        const uint32_t top = (w[j] ^ ~shift_by(w[j], table.shift1)) & 0x44444444u;
        const uint32_t rows0 = bit_select<0x0f0f0f0fu>(number[j], top << 2),
                       rows8 = bit_select<0x0f0f0f0fu>(shift_by(number[j], table.shift4), top >> 2);
        const uint32_t low = prmt(w[j], 0, 0x1404), high = prmt(w[j], 0, 0x3424);
        const uint32_t a[4] = { with_signs(table.at<0x00002001>(rows0), low << 4), with_signs(table.at<0x00002001>(rows8), low),
                                with_signs(table.at<0x20010000>(rows0), high << 4), with_signs(table.at<0x20010000>(rows8), high) };
        use(j, a);
    }
}

} // namespace kvant
