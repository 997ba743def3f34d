/* triangle_template.h - products with lower triangles, and sums of outer products, for any vector width. Part of
 * simd_template.h, behind encode_template.h. */

#define BAND (16 / LANES) /* vectors of the first rows of 16 columns */

/* Sums of vectors from .. vectors - 1 of rows, of some x; fused, from, vectors and some are constants at every call. */
KVANT_INLINE void lower_columns(bool fused, uint32_t some, uint32_t from, uint32_t vectors, const float *column, uint32_t height,
                                uint32_t n_columns, const float *x, uint32_t n, vf sum[COMBINED][COMBINED])
{
    for (uint32_t j = 0; j < n_columns; j++, column += height)
        unrolled_for (uint32_t v = from; v < vectors; v++) {
            const vf numbers = vf_load_unaligned(column + (v - from) * LANES);
            unrolled_for (uint32_t r = 0; r < some; r++)
                sum[r][v] = fused ? vf_fma(vf_set(x[(size_t)r * n + j]), numbers, sum[r][v])
                                  : vf_add(sum[r][v], vf_mul(vf_set(x[(size_t)r * n + j]), numbers));
        }
}

/* Rows from `first` on, as many as vectors have: columns of 16 are one after another in memory. */
KVANT_INLINE void lower_rows(bool fused, uint32_t some, uint32_t vectors, const float *lower, uint32_t n, uint32_t first, const float *x,
                             float *y)
{
    const uint32_t height = kvant_lower_stride(n);
    uint32_t band = 0;
    vf sum[COMBINED][COMBINED];
    unrolled_for (uint32_t r = 0; r < some; r++)
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            sum[r][v] = vf_zero();
    for (; band < first; lower += (size_t)16 * (height - band), band += 16)
        lower_columns(fused, some, 0, vectors, lower + first - band, height - band, 16, x + band, n, sum);
    unrolled_for (uint32_t from = 0; from < vectors; from += BAND) {
        const uint32_t left = n - band;
        lower_columns(fused, some, from, vectors, lower, height - band, left < 16 ? left : 16, x + band, n, sum);
        lower += (size_t)16 * (height - band);
        band += 16;
    }
    unrolled_for (uint32_t r = 0; r < some; r++)
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            vf_store_unaligned(y + (size_t)r * height + first + v * LANES, sum[r][v]);
}

KVANT_INLINE void lower_some(bool fused, uint32_t some, const float *lower, uint32_t n, const float *x, float *y)
{
    const uint32_t vectors = some > 2 && LANES == 8 ? 2 : COMBINED, height = kvant_lower_stride(n);
    uint32_t i = 0;
    for (; i + vectors * LANES <= height; i += vectors * LANES)
        lower_rows(fused, some, vectors, lower, n, i, x, y);
    for (; i < height; i += 16)
        lower_rows(fused, some, BAND, lower, n, i, x, y);
}

KVANT_INLINE void lower_all(bool fused, const float *lower, uint32_t n, uint32_t n_x, const float *x, float *y)
{
    for (; n_x >= COMBINED; n_x -= COMBINED, x += (size_t)COMBINED * n, y += (size_t)COMBINED * kvant_lower_stride(n))
        lower_some(fused, COMBINED, lower, n, x, y);
    switch (n_x) {
    case 3: lower_some(fused, 3, lower, n, x, y); break;
    case 2: lower_some(fused, 2, lower, n, x, y); break;
    case 1: lower_some(fused, 1, lower, n, x, y); break;
    }
}

static KVANT_MULTIPLY_LOWER_FN(NAME(multiply_lower))
{
    lower_all(false, lower, n, n_x, x, y);
}

static KVANT_MULTIPLY_LOWER_FN(NAME(multiply_lower_fused))
{
    lower_all(true, lower, n, n_x, x, y);
}

#define ONES_16 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 /* COMBINED of them */

/* Sums of columns from `first` on over rows i = from .. end - 1; cut: rows end at their i-th number. row: number `first` of row
 * `from`; returned: of row `end`. */
KVANT_INLINE const uint16_t *upper_rows(uint32_t some, uint32_t vectors, bool cut, const uint16_t *row, uint32_t first, uint32_t from,
                                        uint32_t end, uint32_t n, const float *x, vf sum[COMBINED][COMBINED])
{
    static const float kept[2 * 16 * COMBINED] = { ONES_16, ONES_16, ONES_16, ONES_16 };
    for (uint32_t i = from; i < end; row += ++i)
        unrolled_for (uint32_t v = 0; v < vectors; v++) {
            vf numbers = half_load(row + v * LANES);
            if (cut)
                numbers = vf_keep_above(numbers, vf_load_unaligned(kept + 16 * COMBINED - 1 - (i - first) + v * LANES), 1.0f);
            unrolled_for (uint32_t r = 0; r < some; r++)
                sum[r][v] = vf_add(sum[r][v], vf_mul(vf_set(x[(size_t)r * n + i]), numbers));
        }
    return row;
}

/* Columns from `first` on, as many as vectors have and n leaves. Sums of later ones do not need what is stored here. */
KVANT_INLINE void upper_columns(uint32_t some, uint32_t vectors, const uint16_t *triangle, uint32_t n, uint32_t first, float *x)
{
    const uint32_t width = vectors * LANES, left = n - first < width ? n - first : width;
    const uint16_t *row = triangle + (size_t)first * (first + 1) / 2 + first;
    float last[16 * COMBINED];
    vf sum[COMBINED][COMBINED];
    unrolled_for (uint32_t r = 0; r < some; r++)
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            sum[r][v] = vf_zero();
    row = upper_rows(some, vectors, true, row, first, first, first + left, n, x, sum);
    upper_rows(some, vectors, false, row, first, first + left, n, n, x, sum);
    unrolled_for (uint32_t r = 0; r < some; r++) {
        float *to = left < width ? last : x + (size_t)r * n + first;
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            vf_store_unaligned(to + v * LANES, sum[r][v]);
        if (left < width)
            memcpy(x + (size_t)r * n + first, last, left * sizeof *x);
    }
}

KVANT_INLINE void upper_some(uint32_t some, const uint16_t *triangle, uint32_t n, float *x)
{
    uint32_t i = 0;
    for (; some == 1 && i + COMBINED * LANES <= n; i += COMBINED * LANES)
        upper_columns(some, COMBINED, triangle, n, i, x);
    for (; i < n; i += 16)
        upper_columns(some, BAND, triangle, n, i, x);
}

static KVANT_TRIANGLE_FN(NAME(multiply_upper))
{
    for (; n_x >= COMBINED; n_x -= COMBINED, x += (size_t)COMBINED * n)
        upper_some(COMBINED, triangle, n, x);
    switch (n_x) {
    case 3: upper_some(3, triangle, n, x); break;
    case 2: upper_some(2, triangle, n, x); break;
    case 1: upper_some(1, triangle, n, x); break;
    }
}

/* Some vectors of a column of sums: a constant at every call. rows: from the column's number on; x: from the vectors' on. */
KVANT_INLINE void outer_vectors(uint32_t vectors, const float *rows, const float *x, size_t stride, uint32_t n_rows,
                                float *sums)
{
    vf sum[COMBINED];
    unrolled_for (uint32_t v = 0; v < vectors; v++)
        sum[v] = vf_load_unaligned(sums + v * LANES);
    for (uint32_t r = 0; r < n_rows; r++) {
        const vf factor = vf_set(rows[r * stride]);
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            sum[v] = vf_add(sum[v], vf_mul(factor, vf_load_unaligned(x + r * stride + v * LANES)));
    }
    unrolled_for (uint32_t v = 0; v < vectors; v++)
        vf_store_unaligned(sums + v * LANES, sum[v]);
}

static KVANT_ADD_OUTERS_FN(NAME(add_outers))
{
    for (uint32_t j = 0; j < n; j++) {
        uint32_t i = j / 16 * 16;
        for (; i + COMBINED * LANES <= stride; i += COMBINED * LANES, sums += COMBINED * LANES)
            outer_vectors(COMBINED, rows + j, rows + i, stride, n_rows, sums);
        switch ((stride - i) / LANES) {
        case 3: outer_vectors(3, rows + j, rows + i, stride, n_rows, sums); break;
        case 2: outer_vectors(2, rows + j, rows + i, stride, n_rows, sums); break;
        case 1: outer_vectors(1, rows + j, rows + i, stride, n_rows, sums); break;
        }
        sums += stride - i;
    }
}
