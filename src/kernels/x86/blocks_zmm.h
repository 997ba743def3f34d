/* blocks_zmm.h - 16 numbers of a ggml block in one 512-bit register. Codes of 4 bits index a table
 * in a register. The look-up reads only the low 4 bits of a lane, so neighbouring codes need no
 * mask. A fifth bit adds 16 under a mask. */
typedef struct block_table {
    vf values;
} block_table;

KVANT_INLINE block_table block_table_load(const int8_t *values)
{
    return (block_table){ _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)values))) };
}

KVANT_INLINE uint16_t load_u16(const uint8_t *p)
{
    uint16_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

KVANT_INLINE vf block_half(const uint8_t *p)
{
    return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(p))));
}

KVANT_INLINE vf block_nibbles(const block_table *table, const uint8_t *codes, uint32_t part)
{
    vi wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    return _mm512_permutexvar_ps(part ? _mm512_srli_epi32(wide, 4) : wide, table->values);
}

/* Unpacks codes as numbers without their scale; part is 0 or 1, the half of a block. */
KVANT_INLINE void block_codes(kvant_block_type type, kvant_block_format format,
                              const block_table *table, const uint8_t *block, uint32_t part,
                              vf x[1])
{
    if (type == KVANT_BLOCK_Q8_0) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(block + format.codes + 16 * part));
        x[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        return;
    }
    x[0] = block_nibbles(table, block + format.codes, part);
    if (format.has_fifths) {
        __mmask16 fifths = load_u16(block + format.fifths + 2 * part);
        x[0] = _mm512_mask_add_ps(x[0], fifths, x[0], _mm512_set1_ps(16.0f));
    }
}

KVANT_INLINE void block_floats(kvant_block_type type, const uint8_t *p, vf x[1])
{
    if (type == KVANT_BLOCK_F32)
        x[0] = _mm512_loadu_ps(p);
    else if (type == KVANT_BLOCK_F16)
        x[0] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
    else
        x[0] = _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

/* Returns the sums over the lanes of each of four vectors. */
KVANT_INLINE __m128 vf_sums_of_4(const vf v[4])
{
    vf ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    vf cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    vf all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* Loads 4 numbers from each of LANES / 4 rows, which are `stride` apart. */
KVANT_INLINE vf vf_load_strided(const float *p, size_t stride)
{
    vf x = _mm512_castps128_ps512(_mm_load_ps(p));
    x = _mm512_insertf32x4(x, _mm_load_ps(p + stride), 1);
    x = _mm512_insertf32x4(x, _mm_load_ps(p + 2 * stride), 2);
    return _mm512_insertf32x4(x, _mm_load_ps(p + 3 * stride), 3);
}
