/* key_halves.h - tiles of keys from fp16 rows: transposes 8 tokens by 8 channels as halves, then
 * converts to float. */

KVANT_INLINE void transpose_halves(__m128i w[8])
{
    __m128i a[8], b[8];
    unrolled_for (uint32_t i = 0; i < 4; i++) { /* pairs of tokens 2 i and 2 i + 1 */
        a[i] = _mm_unpacklo_epi16(w[2 * i], w[2 * i + 1]);
        a[i + 4] = _mm_unpackhi_epi16(w[2 * i], w[2 * i + 1]);
    }
    unrolled_for (
        uint32_t i = 0; i < 8;
        /* groups of four tokens: channels 2 i' and 2 i' + 1 of the low four tokens, then of the
         * high four */
        i += 2) {
        b[i] = _mm_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm_unpackhi_epi32(a[i], a[i + 1]);
    }
    unrolled_for (uint32_t i = 0; i < 8; i += 4) {
        w[i] = _mm_unpacklo_epi64(b[i], b[i + 2]);
        w[i + 1] = _mm_unpackhi_epi64(b[i], b[i + 2]);
        w[i + 2] = _mm_unpacklo_epi64(b[i + 1], b[i + 3]);
        w[i + 3] = _mm_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
}

/* 8 neighbouring positions are tokens r and r + 1 of the four tiles of 16. */
static KVANT_KEY_HALVES_FN(NAME(key_halves))
{
    for (uint32_t position = 0; position < KVANT_PAGE_TOKENS; position += 8) {
        const uint16_t *first = half + (size_t)(position / 4) * dim;
        uint32_t j = 0;
        for (; j + 8 <= dim; j += 8) {
            __m128i w[8];
            unrolled_for (uint32_t i = 0; i < 8; i++)
                w[i] = _mm_loadu_si128(
                    (const __m128i *)(first + (size_t)(16 * (i % 4) + i / 4) * dim + j));
            transpose_halves(w);
            unrolled_for (uint32_t i = 0; i < 8; i++)
                _mm256_store_ps(tile + (size_t)(j + i) * KVANT_PAGE_TOKENS + position,
                                _mm256_cvtph_ps(w[i]));
        }
        for (; j < dim; j++)
            for (uint32_t i = 0; i < 8; i++)
                tile[(size_t)j * KVANT_PAGE_TOKENS + position + i] =
                    kvant_half_to_float(first[(size_t)(16 * (i % 4) + i / 4) * dim + j]);
    }
}
