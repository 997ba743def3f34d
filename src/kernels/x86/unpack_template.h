/* unpack_template.h - kernels that follow the order of pages, for vectors of 8 or 16 lanes.
 * Included before simd_template.h, with its definitions and
 *
 *   vi_load_lanes(p)     LANES / 4 pieces of 4 words, one every 16 words
 *   vi_shift_right_by(v, n)
 *   table_load(values, n), table_look_up(table, values, codes, n)   n: table entries, a constant */

#include "../unpack_job.h"

/* One field of a plane of p bits, moved up by `at` bits. All numbers are constants. */
KVANT_INLINE vi plane_field(vi w, uint32_t p, uint32_t at, uint32_t field, uint32_t odd)
{
    const vi bits = vi_and(vi_shift_right(w, p * field + 16 * odd), vi_set((1 << p) - 1));
    return at ? vi_shift_left(bits, at) : bits;
}

/* The codes of one field, from planes of 4 bits, then 2 bits, then 1 bit. bits is a constant. */
KVANT_INLINE vi field_codes(const vi *w, uint32_t bits, uint32_t field, uint32_t odd)
{
    const uint32_t fours = bits / 4, twos = bits / 2 % 2;
    vi codes = vi_set(0);
    if (fours > 0)
        codes = plane_field(w[0], 4, 0, field, odd);
    if (fours > 1)
        codes = vi_or(codes, plane_field(w[1], 4, 4, field, odd));
    if (twos)
        codes = vi_or(codes, plane_field(w[fours], 2, 4 * fours, field, odd));
    if (bits % 2)
        codes = vi_or(codes, plane_field(w[fours + twos], 1, bits - 1, field, odd));
    return codes;
}

/* Unpacks the share of 8 columns of one column tile: quad is the lane mod 4, which selects the pair
 * of columns. */
KVANT_INLINE void unpack_quad(const unpack_job *job, uint32_t bits, bool affine,
                              const value_table *entries, uint32_t group, uint32_t ct,
                              uint32_t quad)
{
    const kvant_layout *layout = job->layout;
    for (uint32_t part = 0; part < 32 / LANES; part++) {
        vi w[KVANT_MAX_PLANES];
        for (uint32_t i = 0; i < layout->n_planes; i++) {
            const kvant_plane *plane = &layout->planes[i];
            size_t lane = 32 * (ct / plane->tiles) + quad + LANES * part;
            w[i] = vi_load_lanes(job->words + plane->word_offset +
                                 (size_t)128 * group * plane->units + 4 * lane);
            w[i] = vi_shift_right_by(w[i], plane->bits * 4 * (ct % plane->tiles));
        }
        float *first = job->tile + 64 * group + LANES * part;
        unrolled_for (uint32_t i = 0; i < 8; i++) {
            uint32_t field = i / 2, odd = i % 2,
                     column = 16 * ct + 2 * quad + 8 * (field / 2) + odd;
            uint32_t row = layout->role == KVANT_ROLE_K ? column : kvant_token_position(column);
            vi codes = field_codes(w, bits, field, odd);
            vf x = affine ? vf_add(vf_from_codes(codes), vf_set(job->offset))
                          : table_look_up(entries, job->values, codes, 1u << bits);
            vf_store(first + row * job->stride + 32 * (field % 2), x);
        }
    }
}

KVANT_INLINE void unpack_bits(const unpack_job *job, uint32_t bits, bool affine)
{
    const kvant_layout *layout = job->layout;
    value_table entries = table_load(affine ? NULL : job->values, 1u << bits);
    for (uint32_t group = 0; 4 * group < layout->row_tiles; group++) {
        if (kvant_layout_group_tiles(layout, group) < 4) {
            kvant_unpack_group_c(layout, job->words, job->values, job->offset, group, job->tile);
            continue;
        }
        for (uint32_t ct = 0; ct < layout->column_tiles; ct++)
            for (uint32_t quad = 0; quad < 4; quad++)
                unpack_quad(job, bits, affine, &entries, group, ct, quad);
    }
}

#include "../unpack_kinds.h"

/* Positions run through the 4 token tiles first: a transposition of 4 rows of 16. */
static KVANT_TOKEN_HALVES_FN(NAME(token_halves))
{
    for (uint32_t first = 0; first < 16; first += 8) {
        const __m128i *from = (const __m128i *)(half + first);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 2),
                c = _mm_loadu_si128(from + 4), d = _mm_loadu_si128(from + 6);
        __m128i ab = _mm_unpacklo_epi16(a, b), cd = _mm_unpacklo_epi16(c, d);
        __m128i ab_high = _mm_unpackhi_epi16(a, b), cd_high = _mm_unpackhi_epi16(c, d);
        float *out = x + 4 * first;
        _mm256_store_ps(out, _mm256_cvtph_ps(_mm_unpacklo_epi32(ab, cd)));
        _mm256_store_ps(out + 8, _mm256_cvtph_ps(_mm_unpackhi_epi32(ab, cd)));
        _mm256_store_ps(out + 16, _mm256_cvtph_ps(_mm_unpacklo_epi32(ab_high, cd_high)));
        _mm256_store_ps(out + 24, _mm256_cvtph_ps(_mm_unpackhi_epi32(ab_high, cd_high)));
    }
}
