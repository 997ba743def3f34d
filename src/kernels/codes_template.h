/* codes_template.h - the conversions between numbers and integers around code_dots, for any vector
 * width. Part of simd_template.h.
 *
 * Several rows are processed together, which overlaps the serial reductions of each row. The
 * including file also defines
 *
 *   vi_load(p), vi_float_bits(x)
 *   vi_store_words(p, v)    LANES numbers as 16 bits
 *   vi_store_fours(p, v)    sums of lanes 4 apart
 *   vi_largest(v)           largest of unsigned lanes
 *   vf_repeat_four(p) */

/* The kernel converts this many rows together. A row ends in a few dependent steps (its largest
 * magnitude, the step, the sums), and with several rows at once these steps overlap. */
#define FIXED_ROWS 8u

KVANT_INLINE vf product_at(const float *w, const float *scale, uint32_t i)
{
    return scale ? vf_mul(vf_load(w + i), vf_load(scale + i)) : vf_load(w + i);
}

KVANT_INLINE uint32_t largest_product(const float *w, const float *scale, uint32_t n)
{
    vi largest = vi_set(0);
    for (uint32_t i = 0; i < n; i += LANES)
        largest = vi_max_unsigned(
            largest, vi_and(vi_float_bits(product_at(w, scale, i)), vi_set(0x7fffffff)));
    return (uint32_t)vi_largest(largest);
}

KVANT_INLINE float sum_of_products(const float *w, const float *zero, uint32_t n)
{
    vf sum = vf_zero();
    for (uint32_t i = 0; i < n; i += LANES)
        sum = vf_fma(vf_load(w + i), vf_load(zero + i), sum);
    return vf_sum(sum);
}

/* Rounds the numbers of a row. With an inverse of 0 the products are 0 or, for infinities, NaN; a
 * NaN does not become an integer but 0. */
KVANT_INLINE void round_row(const float *w, const float *scale, uint32_t n, float inverse,
                            int16_t *x, int32_t *sums)
{
    if (!(inverse > 0)) {
        memset(x, 0, n * sizeof *x);
        if (sums)
            memset(sums, 0, n / KVANT_TILE * sizeof *sums);
        return;
    }
    for (uint32_t block = 0; block < n; block += KVANT_PAGE_TOKENS) {
        vi sum = vi_set(0);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i += LANES) {
            vi whole = vi_from_whole(vf_mul(product_at(w, scale, block + i), vf_set(inverse)));
            vi_store_words(x + block + i, whole);
            sum = vi_add(sum, whole);
        }
        if (sums)
            vi_store_fours(sums + block / KVANT_TILE, sum);
    }
}

KVANT_INLINE void round_rows(const kvant_fixed_rows *rows, uint32_t n, uint32_t first,
                             uint32_t n_rows)
{
    float inverse[FIXED_ROWS];
    uint32_t largest[FIXED_ROWS];
    const float *w = rows->w + (size_t)first * n, *scale = rows->scale, *zero = rows->zero;
    for (uint32_t i = 0; i < n_rows; i++)
        largest[i] = largest_product(w + (size_t)i * n, scale, n);
    for (uint32_t i = 0; i < n_rows; i++)
        rows->steps[(first + i) * rows->line_stride] =
            kvant_fixed_point_step(largest[i], rows->limit, &inverse[i]);
    for (uint32_t i = 0; i < n_rows; i++)
        rows->zeros[(first + i) * rows->line_stride] =
            zero ? sum_of_products(w + (size_t)i * n, zero, n) : 0;
    for (uint32_t i = 0; i < n_rows; i++)
        round_row(w + (size_t)i * n, scale, n, inverse[i], rows->x + (first + i) * rows->x_stride,
                  rows->sums ? rows->sums + (size_t)(first + i) * (n / KVANT_TILE) : NULL);
}

static KVANT_FIXED_POINT_FN(NAME(fixed_point))
{
    for (uint32_t first = 0; first < n_rows; first += FIXED_ROWS)
        round_rows(rows, n, first, n_rows - first < FIXED_ROWS ? n_rows - first : FIXED_ROWS);
}

KVANT_INLINE void sum_group(const int32_t *dots, const kvant_code_sums *out, uint32_t group,
                            uint32_t i)
{
    const float *steps = out->steps + (size_t)i * out->n_bands;
    const float *offsets = out->offsets ? out->offsets + (size_t)i * out->n_bands : NULL;
    vf step = vf_set(steps[0]), offset = offsets ? vf_set(offsets[0]) : vf_zero();
    if (out->n_bands > 1) {
        _Alignas(64) float of_tile[2][4] = { { 0 } };
        for (uint32_t k = 0; k < 4; k++) {
            const uint32_t band = (4 * group + k) / out->band_tiles;
            of_tile[0][k] = steps[band];
            of_tile[1][k] = offsets ? offsets[band] : 0;
        }
        step = vf_repeat_four(of_tile[0]);
        offset = vf_repeat_four(of_tile[1]);
    }
    uint32_t first = KVANT_PAGE_TOKENS * group;
    float *sums = out->sums + i * out->stride + first;
    for (uint32_t j = 0; j < KVANT_PAGE_TOKENS; j += LANES)
        vf_store(sums + j, code_sum(vi_load(dots + j), step, offset, out, first + j, sums + j));
}

static KVANT_SUM_DOTS_FN(NAME(sum_dots))
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t group = 0; 4 * group < layout->row_tiles; group++) {
            const int32_t *from = dots + i * dots_stride + KVANT_PAGE_TOKENS * group;
            if (kvant_layout_group_tiles(layout, group) < 4)
                kvant_sum_group_c(layout, group, from, out, i);
            else
                sum_group(from, out, group, i);
        }
}
