/* blocks_ymm.h - 16 numbers of a ggml block in two 256-bit registers. Codes become signed bytes,
 * then integers, then floats. A byte shuffle of a table converts 4-bit codes. */
typedef struct block_table {
    __m128i values;
} block_table;

KVANT_INLINE block_table block_table_load(const int8_t *values)
{
    return (block_table){ _mm_loadu_si128((const __m128i *)values) };
}

KVANT_INLINE vf block_half(const uint8_t *p)
{
    uint16_t x;
    memcpy(&x, p, sizeof x);
    return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(x)));
}

/* Gives 16 in every byte whose bit is set among 16 bits. */
KVANT_INLINE __m128i block_fifths(const uint8_t *p)
{
    const __m128i which = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128i bit = _mm_set1_epi64x((long long)0x8040201008040201u);
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    __m128i spread = _mm_and_si128(_mm_shuffle_epi8(_mm_cvtsi32_si128(bits), which), bit);
    return _mm_and_si128(_mm_cmpeq_epi8(spread, bit), _mm_set1_epi8(16));
}

/* Unpacks codes as numbers without their scale; part is 0 or 1, the half of a block. */
KVANT_INLINE void block_codes(kvant_block_type type, kvant_block_format format,
                              const block_table *table, const uint8_t *block, uint32_t part,
                              vf x[2])
{
    __m128i bytes;
    if (type == KVANT_BLOCK_Q8_0) {
        bytes = _mm_loadu_si128((const __m128i *)(block + format.codes + 16 * part));
    } else {
        bytes = _mm_loadu_si128((const __m128i *)(block + format.codes));
        bytes = _mm_and_si128(part ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
        bytes = _mm_shuffle_epi8(table->values, bytes);
        if (format.has_fifths)
            bytes = _mm_add_epi8(bytes, block_fifths(block + format.fifths + 2 * part));
    }
    x[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    x[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
}

KVANT_INLINE void block_floats(kvant_block_type type, const uint8_t *p, vf x[2])
{
    for (uint32_t i = 0; i < 2; i++) {
        if (type == KVANT_BLOCK_F32) {
            x[i] = _mm256_loadu_ps((const float *)(const void *)(p + 32 * i));
            continue;
        }
        __m128i half = _mm_loadu_si128((const __m128i *)(p + 16 * i));
        x[i] = type == KVANT_BLOCK_F16
                   ? _mm256_cvtph_ps(half)
                   : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
}

/* Returns the sums over the lanes of each of four vectors. */
KVANT_INLINE __m128 vf_sums_of_4(const vf v[4])
{
    vf all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

/* Loads 4 numbers from each of LANES / 4 rows, which are `stride` apart. */
KVANT_INLINE vf vf_load_strided(const float *p, size_t stride)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(p)), _mm_load_ps(p + stride), 1);
}
