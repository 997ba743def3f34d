/* packs.h - operations of packs_template.h for ymm and zmm. A level defines add_fours(sum, a, b) if
 * it has an instruction that multiplies unsigned bytes a by signed bytes b and adds four products
 * to each sum. It defines look_up_bytes(table, v) if its byte look-up reads 6 bits of an index,
 * which saves a mask. */
#define PACK_BYTES (LANES * 4)
#define PACK_TILE (LANES / 2)
#define pack_bytes vi
#define pack_sums vi
#define pack_load(p) vi_load(p)
#define pack_store(p, v) vi_store_aligned(p, v)
#define pack_set(n) vi_set(n)
#define pack_table(bytes) vi_repeat(_mm_loadu_si128((const __m128i *)(const void *)(bytes)))
#define pack_finish(a, b) vi_add(a, b)

/* Compilers take only literal numbers as immediate operands. */
KVANT_INLINE vi pack_shift(vi v, uint32_t shift)
{
    switch (shift) {
    case 1: return MM(srli_epi16)(v, 1);
    case 2: return MM(srli_epi16)(v, 2);
    case 3: return MM(srli_epi16)(v, 3);
    case 4: return MM(srli_epi16)(v, 4);
    case 5: return MM(srli_epi16)(v, 5);
    case 6: return MM(srli_epi16)(v, 6);
    case 7: return MM(srli_epi16)(v, 7);
    default: return v;
    }
}

#ifdef look_up_bytes
#define pack_look_up(table, v, shift) look_up_bytes(table, pack_shift(v, shift))
#else
#define pack_look_up(table, v, shift)                                                              \
    MM(shuffle_epi8)(table, vi_and(pack_shift(v, shift), MM(set1_epi8)(15)))
#endif

/* Bit high_shift becomes bit 2. */
KVANT_INLINE vi pack_look_up_two(vi table, vi low, uint32_t shift, vi high, uint32_t high_shift)
{
    const vi up = high_shift == 0   ? MM(slli_epi16)(high, 2)
                  : high_shift == 1 ? MM(slli_epi16)(high, 1)
                                    : pack_shift(high, high_shift - 2);
    const vi index =
        vi_or(vi_and(pack_shift(low, shift), MM(set1_epi8)(3)), vi_and(up, MM(set1_epi8)(4)));
    return MM(shuffle_epi8)(table, index);
}

KVANT_INLINE vi pack_query(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return vi_set(four);
}

#ifdef add_fours
#define PACK_BIASED(bits) true
#define pack_whole(v) (v)
#define pack_add_whole(sums, operand, x) add_fours(sums, operand, pack_query(x))

KVANT_INLINE vi pack_add(vi sums, const vi *operands, uint32_t n, uint32_t fold, const int8_t *x,
                         size_t step)
{
    (void)fold;
    unrolled_for (uint32_t i = 0; i < n; i++)
        sums = add_fours(sums, operands[i], pack_query(x + i * step));
    return sums;
}
#else
/* Sums of pairs of products have 16 bits, and several are added before they become 32 bits wide.
 * The largest sums fit: 4 x 508 (1 bit), 2 x 5080 (2 bits), 2 x 13208 (3 bits) and 30988 (4 bits).
 * With 8 bits, the sign moves from the level to the query, and the largest sum is 32512. */
#define PACK_BIASED(bits) ((bits) != 8)
#define pack_fold(sums, pairs) vi_add(sums, MM(madd_epi16)(pairs, MM(set1_epi16)(1)))
#define pack_whole(v) MM_WHOLE (xor)(v, MM(set1_epi8)((char)-128))

KVANT_INLINE vi pack_add(vi sums, const vi *operands, uint32_t n, uint32_t fold, const int8_t *x,
                         size_t step)
{
    unrolled_for (uint32_t i = 0; i < n; i += fold) {
        vi pairs = MM(maddubs_epi16)(operands[i], pack_query(x + i * step));
        unrolled_for (uint32_t j = i + 1; j < i + fold; j++)
            pairs = MM(add_epi16)(pairs, MM(maddubs_epi16)(operands[j], pack_query(x + j * step)));
        sums = pack_fold(sums, pairs);
    }
    return sums;
}

KVANT_INLINE vi pack_add_whole(vi sums, vi level, const int8_t *x)
{
    const vi query = pack_query(x);
#if PACK_BYTES == 64
    const vi turned =
        _mm512_mask_sub_epi8(query, _mm512_movepi8_mask(level), _mm512_setzero_si512(), query);
#else
    const vi turned = _mm256_sign_epi8(query, level); /* 0 where the level is 0 */
#endif
    return pack_fold(sums, MM(maddubs_epi16)(MM(abs_epi8)(level), turned));
}
#endif

#include "../packs_template.h"
