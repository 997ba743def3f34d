/* triangle_template.h - products with lower triangles, and sums of outer products, for any vector
 * width. Part of simd_template.h, behind encode_template.h. */

#define BAND (16 / LANES) /* vectors that hold 16 columns */

/* Reads row i. steps: the triangle's steps and then its diagonal, as floats. */
KVANT_INLINE void read_row(const uint16_t *triangle, const float *steps, uint32_t n, uint32_t i,
                           float *row)
{
    const uint8_t *codes = kvant_triangle_codes(triangle, n, i);
    for (uint32_t j = 0; j < i; j += LANES)
        vf_store_unaligned(row + j, vf_mul(vf_load_nibbles(codes + j / 2), vf_set(steps[i])));
    row[i] = steps[n + i];
}

static KVANT_TRIANGLE_ROW_FN(NAME(triangle_row))
{
    float steps[2 * KVANT_MAX_HEAD_DIM];
    steps[i] = kvant_half_to_float(triangle[i]);
    steps[n + i] = kvant_half_to_float(triangle[n + i]);
    read_row(triangle, steps, n, i, row);
}

/* A register holds the i-th number of LANES solutions. In z, the registers of each number i are
 * consecutive: `vectors` registers, for the vectors that are solved together. */
/* Rows that share a load of z. The sums of more rows would not fit the registers. */
#define TOGETHER 4u

/* Numbers of the vectors that are solved together: 8 KiB, because stacks may be small. */
#define SOLVED 2048u

/* The memory of solve_lower. It is that function's own: memory of the functions that are parts of
 * it would be there once for each call. */
typedef struct lower_memory {
    float z[SOLVED];
    float steps[2 * KVANT_MAX_HEAD_DIM]; /* the triangle's steps, and then its diagonal */
    float row[TOGETHER][SOLVED / LANES];
} lower_memory;

/* Solves rows first .. first + rows - 1. vectors and rows are constants at every call. */
KVANT_INLINE void lower_rows(uint32_t vectors, uint32_t rows, const uint16_t *triangle, uint32_t n,
                             uint32_t first, lower_memory *memory)
{
    float *z = memory->z, (*row)[SOLVED / LANES] = memory->row;
    vf sum[TOGETHER][2];
    unrolled_for (uint32_t k = 0; k < rows; k++) {
        read_row(triangle, memory->steps, n, first + k, row[k]);
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            sum[k][v] = vf_load_unaligned(z + ((size_t)(first + k) * vectors + v) * LANES);
    }
    for (uint32_t j = 0; j < first; j++)
        unrolled_for (uint32_t v = 0; v < vectors; v++) {
            const vf solved = vf_load_unaligned(z + ((size_t)j * vectors + v) * LANES);
            unrolled_for (uint32_t k = 0; k < rows; k++)
                sum[k][v] = vf_sub(sum[k][v], vf_mul(vf_set(row[k][j]), solved));
        }
    unrolled_for (uint32_t k = 0; k < rows; k++)
        unrolled_for (uint32_t v = 0; v < vectors; v++) {
            unrolled_for (uint32_t l = 0; l < k; l++)
                sum[k][v] = vf_sub(sum[k][v], vf_mul(vf_set(row[k][first + l]), sum[l][v]));
            sum[k][v] = vf_mul(sum[k][v], vf_set(1 / row[k][first + k]));
            vf_store_unaligned(z + ((size_t)(first + k) * vectors + v) * LANES, sum[k][v]);
        }
}

/* Solves at most vectors * LANES vectors. */
KVANT_INLINE void lower_some(uint32_t vectors, const uint16_t *triangle, uint32_t n, uint32_t n_x,
                             float *x, lower_memory *memory)
{
    const uint32_t width = vectors * LANES;
    float *z = memory->z;
    uint32_t i = 0;
    memset(z, 0, (size_t)n * width * sizeof *z);
    for (uint32_t r = 0; r < n_x; r++)
        for (uint32_t j = 0; j < n; j++)
            z[j * width + r] = x[(size_t)r * n + j];
    for (; i + TOGETHER <= n; i += TOGETHER)
        lower_rows(vectors, TOGETHER, triangle, n, i, memory);
#define LAST_LOWER_ROWS(rows) lower_rows(vectors, rows, triangle, n, i, memory)
    KVANT_CALL_CONSTANT(n - i, 3, LAST_LOWER_ROWS)
    for (uint32_t r = 0; r < n_x; r++)
        for (uint32_t j = 0; j < n; j++)
            x[(size_t)r * n + j] = z[j * width + r];
}

static KVANT_TRIANGLE_FN(NAME(solve_lower))
{
    const bool fits = n * LANES <= SOLVED, two = 2 * n * LANES <= SOLVED;
    lower_memory memory;
    NAME(half_to_float)(triangle, memory.steps, 2 * n);
    if (!fits) /* a part has at most 128 channels, unless head_dim is odd */
        kvant_solve_lower_c(triangle, n, n_x, x);
    for (; fits && !two && n_x; x += (size_t)LANES * n, n_x -= n_x < LANES ? n_x : LANES)
        lower_some(1, triangle, n, n_x < LANES ? n_x : LANES, x, &memory);
    if (!two)
        return;
    for (; n_x > LANES; x += (size_t)2 * LANES * n, n_x -= n_x < 2 * LANES ? n_x : 2 * LANES)
        lower_some(2, triangle, n, n_x < 2 * LANES ? n_x : 2 * LANES, x, &memory);
    if (n_x)
        lower_some(1, triangle, n, n_x, x, &memory);
}

#undef TOGETHER
#undef SOLVED

#define ONES_16 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 /* COMBINED of them */

/* Adds rows i = from .. end - 1 to the sums of the columns from `first` on. With `cut`, row i ends
 * before its i-th number. */
KVANT_INLINE void upper_rows(uint32_t some, uint32_t vectors, bool cut, const uint16_t *triangle,
                             const float *steps, uint32_t first, uint32_t from, uint32_t end,
                             uint32_t n, const float *x, vf sum[COMBINED][COMBINED])
{
    static const float kept[2 * 16 * COMBINED] = { ONES_16, ONES_16, ONES_16, ONES_16 };
    for (uint32_t i = from; i < end; i++) {
        const uint8_t *codes = kvant_triangle_codes(triangle, n, i) + first / 2;
        unrolled_for (uint32_t v = 0; v < vectors; v++) {
            vf numbers = vf_mul(vf_load_nibbles(codes + v * LANES / 2), vf_set(steps[i]));
            if (cut)
                numbers = vf_keep_above(
                    numbers, vf_load_unaligned(kept + 16 * COMBINED - (i - first) + v * LANES),
                    1.0f);
            unrolled_for (uint32_t r = 0; r < some; r++)
                sum[r][v] = vf_add(sum[r][v], vf_mul(vf_set(x[(size_t)r * n + i]), numbers));
        }
    }
}

/* Computes the columns from `first` on, as many as the vectors hold and n allows. Later columns do
 * not need the numbers that this overwrites. */
KVANT_INLINE void upper_columns(uint32_t some, uint32_t vectors, const uint16_t *triangle,
                                const float *steps, uint32_t n, uint32_t first, float *x)
{
    const uint32_t width = vectors * LANES, left = n - first < width ? n - first : width;
    const float *diagonal = steps + n + first;
    float last[16 * COMBINED] = { 0 };
    vf sum[COMBINED][COMBINED];
    unrolled_for (uint32_t r = 0; r < some; r++) {
        const float *own = x + (size_t)r * n + first;
        if (left < width)
            own = memcpy(last, own, left * sizeof *x);
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            sum[r][v] = vf_add(vf_zero(), vf_mul(vf_load_unaligned(own + v * LANES),
                                                 vf_load_unaligned(diagonal + v * LANES)));
    }
    upper_rows(some, vectors, true, triangle, steps, first, first + 1, first + left, n, x, sum);
    upper_rows(some, vectors, false, triangle, steps, first, first + left, n, n, x, sum);
    unrolled_for (uint32_t r = 0; r < some; r++) {
        float *to = left < width ? last : x + (size_t)r * n + first;
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            vf_store_unaligned(to + v * LANES, sum[r][v]);
        if (left < width)
            memcpy(x + (size_t)r * n + first, last, left * sizeof *x);
    }
}

KVANT_INLINE void upper_some(uint32_t some, const uint16_t *triangle, const float *steps,
                             uint32_t n, float *x)
{
    uint32_t i = 0;
    for (; some == 1 && i + COMBINED * LANES <= n; i += COMBINED * LANES)
        upper_columns(some, COMBINED, triangle, steps, n, i, x);
    for (; i < n; i += 16)
        upper_columns(some, BAND, triangle, steps, n, i, x);
}

static KVANT_TRIANGLE_FN(NAME(multiply_upper))
{
    float steps[2 * KVANT_MAX_HEAD_DIM + 16];
    NAME(half_to_float)(triangle, steps, 2 * n);
    for (; n_x >= COMBINED; n_x -= COMBINED, x += (size_t)COMBINED * n)
        upper_some(COMBINED, triangle, steps, n, x);
#define LAST_UPPER(last) upper_some(last, triangle, steps, n, x)
    KVANT_CALL_CONSTANT(n_x, 3, LAST_UPPER)
}

/* Updates some vectors of a column of sums; their number is a constant at every call. rows begins
 * at the column's number, x at the first number of these vectors. */
KVANT_INLINE void outer_vectors(uint32_t vectors, const float *rows, const float *x, size_t stride,
                                uint32_t n_rows, float *sums)
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
#define LAST_OUTERS(vectors) outer_vectors(vectors, rows + j, rows + i, stride, n_rows, sums)
        KVANT_CALL_CONSTANT((stride - i) / LANES, 3, LAST_OUTERS)
        sums += stride - i;
    }
}
