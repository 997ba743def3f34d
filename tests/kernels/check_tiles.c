/* check_tiles.c - kernels on unpacked pages: unpack, products of matrices, softmax's exponentials,
 * scales and zero points. The bounds are the bounds of kernels.h, against sums in double. */
#include "check.h"

static const uint32_t dims[] = { 16, 40, 64, 80, 96, 128, 192, 256, 512 };

static void fill_codes(checker *check, void *page, size_t bytes, uint32_t round)
{
    check_bytes(check, page, bytes, round == 0 ? 0 : round == 1 ? 0xff : -1);
}

/* The tile as the layout's own reader returns it. */
static void expect_tile(const kvant_layout *layout, const void *page, const float *values,
                        float offset, float *tile)
{
    uint8_t codes[KVANT_MAX_PADDED_DIM];
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        kvant_layout_get(layout, page, t, codes);
        for (uint32_t j = 0; j < layout->padded_dim; j++) {
            uint32_t at = layout->role == KVANT_ROLE_K
                              ? j * KVANT_PAGE_TOKENS + kvant_layout_row_position(layout, t)
                              : kvant_token_position(t) * layout->padded_dim +
                                    kvant_layout_row_position(layout, j);
            tile[at] = values ? values[codes[j]] : (float)codes[j] + offset;
        }
    }
}

static void check_unpack_of(checker *check, const kvant_kernels *kernels,
                            const kvant_layout *layout, uint32_t round)
{
    static float want[KVANT_MAX_PADDED_DIM * KVANT_PAGE_TOKENS];
    size_t n = (size_t)layout->padded_dim * KVANT_PAGE_TOKENS;
    uint32_t n_values =
        layout->bits > 5 ? 1u << layout->bits : 32; /* numbers that may be read but are not used */
    for (uint32_t table = 0; table < 2; table++) {
        check_case(check, "role %d, head_dim %u, %u bits, %s, round %u", (int)layout->role,
                   layout->head_dim, layout->bits, table ? "values" : "offset", round);
        void *page = check_input(check, "page", layout->code_bytes, 64);
        float *values = check_input(check, "values", n_values * sizeof *values, sizeof *values);
        float *tile = check_output(check, "tile", n * sizeof *tile, 64);
        float offset = -(float)check_below(check, 256);
        fill_codes(check, page, layout->code_bytes, round);
        check_floats(check, values, n_values, CHECK_AWKWARD);
        expect_tile(layout, page, table ? values : NULL, offset, want);
        CHECK_CALL(check, kernels->unpack(layout, page, table ? values : NULL, offset, tile));
        check_same(check, "tile", tile, want, n, sizeof *tile);
    }
}

CHECK(unpack)
{
    kvant_layout layout;
    for (uint32_t bits = 1; bits <= 8; bits++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (int role = 0; role < 2; role++)
                for (uint32_t round = 0; round < 3; round++) {
                    kvant_layout_init(&layout, (kvant_role)role, dims[d], bits);
                    check_unpack_of(check, kernels, &layout, round);
                }
}

BENCH(unpack)
{
    static const uint32_t bits[] = { 2, 4, 8 };
    kvant_layout layout;
    for (size_t i = 0; i < COUNT(bits); i++)
        for (int role = 0; role < 2; role++) {
            kvant_layout_init(&layout, (kvant_role)role, 128, bits[i]);
            check_case(check, "bench");
            void *page = check_input(check, "page", layout.code_bytes, 64);
            float *values = check_input(check, "values", 256 * sizeof *values, 64);
            float *tile = check_output(check, "tile", 128 * KVANT_PAGE_TOKENS * sizeof *tile, 64);
            check_bytes(check, page, layout.code_bytes, -1);
            check_floats(check, values, 256, CHECK_NORMAL);
            CHECK_BENCH(check, kernels->unpack(&layout, page, values, 0, tile),
                        "%s, head_dim 128, %u bits", role == KVANT_ROLE_K ? "K" : "V", bits[i]);
        }
}

typedef struct product {
    uint32_t m, k, n;
    size_t lda, ldb, ldc;
    float *a, *b, *c;
} product;

static product make_product(checker *check, uint32_t m, uint32_t k, uint32_t n, uint32_t spare,
                            check_fill fill)
{
    product p = { m, k, n, k + spare, n + 16 * spare, n + 16 * spare, NULL, NULL, NULL };
    check_case(check, "%u x %u times %u x %u, spare columns %u, %s", m, k, k, n, spare,
               check_fill_name(fill));
    /* The last row may end where the matrix ends. */
    size_t a = (m - 1) * p.lda + k, b = (k - 1) * p.ldb + n, c = (m - 1) * p.ldc + n;
    p.a = check_input(check, "a", a * sizeof(float), sizeof(float));
    p.b = check_input(check, "b", b * sizeof(float), 64);
    p.c = check_output(check, "c", c * sizeof(float), 64);
    check_floats(check, p.a, a, fill);
    check_floats(check, p.b, b, fill);
    check_floats(check, p.c, c, spare ? CHECK_NORMAL : CHECK_ZEROS);
    return p;
}

/* Checks element (i, j) against the size of its terms; growth: (1 + 2^-23)^steps. An underflow of
 * any of its 2 k roundings adds 2^-150. */
static void check_element(checker *check, const product *p, const float *before, double growth,
                          uint32_t i, uint32_t j)
{
    double sum = before[i * p->ldc + j], size = fabs(sum);
    for (uint32_t l = 0; l < p->k; l++) {
        double term = (double)p->a[i * p->lda + l] * p->b[l * p->ldb + j];
        sum += term;
        size += fabs(term);
    }
    uint32_t steps = p->k + (before[i * p->ldc + j] != 0); /* an addition to zero is not rounded */
    double bound = steps * 0x1p-24 * growth * size * (1 + 0x1p-20) + 2 * p->k * 0x1p-150;
    check_near(check, "c", i * p->ldc + j, p->c[i * p->ldc + j], sum, bound);
}

static void check_product(checker *check, const kvant_kernels *kernels, const product *p)
{
    static float before[16 * 640];
    double growth = pow(1 + 0x1p-23, p->k + 1);
    memcpy(before, p->c, ((p->m - 1) * p->ldc + p->n) * sizeof(float));
    CHECK_CALL(check, kernels->matmul(p->a, p->lda, p->b, p->ldb, p->c, p->ldc, p->m, p->k, p->n));
    for (uint32_t i = 0; i < p->m && check_compares(check); i++) {
        for (uint32_t j = 0; j < p->n; j++)
            check_element(check, p, before, growth, i, j);
        if (i + 1 < p->m)
            check_same(check, "c behind a row", p->c + i * p->ldc + p->n,
                       before + i * p->ldc + p->n, p->ldc - p->n, sizeof(float));
    }
}

CHECK(matmul)
{
    static const uint32_t columns[] = { 16, 32, 48, 64, 80, 128, 192, 512 },
                          depths[] = { 1, 7, 64, 80, 128 };
    for (uint32_t m = 1; m <= 13; m++)
        for (size_t i = 0; i < COUNT(columns); i++) {
            uint32_t k = depths[(m + i) % COUNT(depths)];
            for (int fill = 0; fill < CHECK_N_FILLS; fill++) {
                product p =
                    make_product(check, m, k, columns[i], (m + (uint32_t)i) % 3, (check_fill)fill);
                if (fill != CHECK_AWKWARD) /* its sums may overflow */
                    check_product(check, kernels, &p);
            }
        }
}

BENCH(matmul)
{
    static const uint32_t rows[] = { 1, 4, 8, 64 };
    for (size_t i = 0; i < COUNT(rows); i++) {
        product p = make_product(check, rows[i], 128, 64, 0, CHECK_NORMAL);
        CHECK_BENCH(check, kernels->matmul(p.a, p.lda, p.b, p.ldb, p.c, p.ldc, p.m, p.k, p.n),
                    "%u x 128 times 128 x 64", rows[i]);
    }
}

/* Typical scores, and scores that the contract also allows: far below the shift, hidden, all
 * equal. */
static void fill_scores(checker *check, float *x, uint32_t n, float shift, uint32_t kind)
{
    static const float widths[] = { 0, 1, 10, 88, 200, 1e30f };
    for (uint32_t i = 0; i < n; i++) {
        x[i] = shift - widths[kind % COUNT(widths)] * check_uniform(check);
        if (kind >= COUNT(widths) && check_below(check, 3) == 0)
            x[i] = -INFINITY;
    }
    x[check_below(check, n)] = shift;
}

/* Makes one score NaN among the numbers that exp_sum left in x. */
static void check_nan_stays(checker *check, const kvant_kernels *kernels, float *x, uint32_t n,
                            float shift)
{
    const uint32_t at = check_below(check, n);
    float sum = 0;
    fill_scores(check, x, n, shift, 0);
    x[at] = NAN;
    CHECK_CALL(check, sum = kernels->exp_sum(x, n, shift));
    if (!isnan(sum) || !isnan(x[at]))
        check_fail(check, "a NaN at %u became %g, the sum %g", at, (double)x[at], (double)sum);
}

CHECK(exp_sum)
{
    static const float shifts[] = { 0, 1.5f, -1234.25f, 3e4f };
    static const uint32_t lengths[] = { 16, 32, 48, 64, 80, 128, 512 };
    for (uint32_t kind = 0; kind < 12; kind++)
        for (size_t s = 0; s < COUNT(shifts); s++)
            for (size_t l = 0; l < COUNT(lengths); l++) {
                uint32_t n = lengths[l];
                float before[512], shift = shifts[s];
                check_case(check, "%u numbers, shift %g, kind %u", n, (double)shift, kind);
                float *x = check_output(check, "x", n * sizeof *x, 64), sum = 0;
                fill_scores(check, x, n, shift, kind);
                memcpy(before, x, n * sizeof *x);
                CHECK_CALL(check, sum = kernels->exp_sum(x, n, shift));
                double total = 0;
                for (uint32_t i = 0; i < n; i++) {
                    double exponent = (double)before[i] - shift, want = exp(exponent);
                    double bound = want * (0x1p-21 + fabs(exponent) * 0x1p-23) * (1 + 0x1p-20);
                    total += x[i];
                    if (before[i] - shift < -87.0f)
                        check_near(check, "x", i, x[i], 0, 0);
                    else
                        check_near(check, "x", i, x[i], want, bound);
                }
                /* n - 1 additions in any order */
                check_near(check, "sum", 0, sum, total, (n - 1) * 0x1p-24 * (1 + 0x1p-14) * total);
                check_nan_stays(check, kernels, x, n, shift);
            }
}

BENCH(exp_sum)
{
    check_case(check, "bench");
    float *x = check_output(check, "x", 64 * sizeof *x, 64);
    volatile float sum = 0; /* keeps the compiler from removing the timed calls */
    check_floats(check, x, 64, CHECK_ZEROS);
    CHECK_BENCH(check, sum += kernels->exp_sum(x, 64, 2),
                "64"); /* e^(x - 2) has a fixed point below 2 */
    (void)sum;
}

CHECK(mask_scores)
{
    static const float slopes[] = { 1, 0.0625f, 0.7f };
    for (uint32_t kind = 0; kind < 8; kind++)
        for (size_t s = 0; s < COUNT(slopes); s++) {
            bool no_mask = kind % 4 == 0, all_hidden = kind % 4 == 3;
            float before[64], largest = 0;
            double want = -INFINITY;
            check_case(check, "slope %g, kind %u", (double)slopes[s], kind);
            float *scores = check_output(check, "scores", sizeof before, 64);
            float *mask = check_input(check, "mask", sizeof before, 64);
            check_floats(check, scores, 64, CHECK_NORMAL);
            for (uint32_t i = 0; i < 64; i++) {
                bool hidden = all_hidden || check_below(check, 3) == 0;
                mask[i] = hidden          ? -INFINITY
                          : kind % 4 == 1 ? 0
                                          : -65504 * (float)check_uniform(check);
                if (hidden && !no_mask && kind > 3) /* memory that was never written */
                    scores[i] = i % 2 ? INFINITY : NAN;
            }
            memcpy(before, scores, sizeof before);
            CHECK_CALL(check,
                       largest = kernels->mask_scores(scores, no_mask ? NULL : mask, slopes[s]));
            for (uint32_t i = 0; i < 64; i++) {
                double term = no_mask ? 0 : (double)slopes[s] * mask[i], sum = before[i] + term;
                want = scores[i] > want ? scores[i] : want;
                if (term == -INFINITY)
                    check_same(check, "scores", &scores[i], &mask[i], 1, sizeof *mask);
                else
                    check_near(check, "scores", i, scores[i], sum,
                               (fabs(sum) + fabs(term)) * 0x1p-24);
            }
            check_same(check, "largest", &largest, &(float){ (float)want }, 1, sizeof largest);
        }
}

BENCH(mask_scores)
{
    check_case(check, "bench");
    float *scores = check_output(check, "scores", 64 * sizeof *scores, 64);
    float *mask = check_input(check, "mask", 64 * sizeof *mask, 64);
    volatile float sum = 0; /* keeps the compiler from removing the timed calls */
    check_floats(check, scores, 64, CHECK_NORMAL);
    check_floats(check, mask, 64, CHECK_ZEROS);
    CHECK_BENCH(check, sum += kernels->mask_scores(scores, NULL, 1), "no mask");
    CHECK_BENCH(check, sum += kernels->mask_scores(scores, mask, 1), "mask");
    (void)sum;
}

/* Checks scale_rows if by_row is set, otherwise scale_columns. */
static void check_scale(checker *check, const kvant_kernels *kernels, uint32_t m, uint32_t n,
                        check_fill fill, bool by_row)
{
    static float before[80 * 512];
    uint32_t n_scales = by_row ? m : n;
    check_case(check, "%u x %u, %s", m, n, check_fill_name(fill));
    float *tile = check_output(check, "tile", (size_t)m * n * sizeof *tile, 64);
    float *scale = check_input(check, "scale", n_scales * sizeof *scale, 64);
    float *zero = check_input(check, "zero", n_scales * sizeof *zero, 64);
    check_floats(check, tile, (size_t)m * n, CHECK_NORMAL);
    check_floats(check, scale, n_scales, fill);
    check_floats(check, zero, n_scales, (check_fill)check_below(check, CHECK_N_FILLS));
    memcpy(before, tile, (size_t)m * n * sizeof *tile);
    CHECK_CALL(check,
               (by_row ? kernels->scale_rows : kernels->scale_columns)(tile, m, n, scale, zero));
    for (uint32_t i = 0; i < m && check_compares(check); i++)
        for (uint32_t j = 0; j < n; j++) {
            uint32_t s = by_row ? i : j;
            double term = (double)before[i * n + j] * scale[s], want = term + zero[s];
            double bound = check_rounding(term);
            check_near(check, "tile", i * n + j, tile[i * n + j], want,
                       bound + check_rounding(fabs(want) + bound));
        }
}

static void check_scales(checker *check, const kvant_kernels *kernels, bool by_row)
{
    static const uint32_t rows[] = { 1, 2, 3, 16, 40, 64, 80 },
                          columns[] = { 16, 32, 48, 64, 80, 128, 512 };
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(columns); j++)
            for (int fill = 0; fill < CHECK_N_FILLS; fill++)
                check_scale(check, kernels, rows[i], columns[j], (check_fill)fill, by_row);
}

static void bench_scales(checker *check, const kvant_kernels *kernels, bool by_row)
{
    check_case(check, "bench");
    float *tile = check_output(check, "tile", 64 * 128 * sizeof *tile, 64);
    float *scale = check_input(check, "scale", 128 * sizeof *scale, 64);
    float *zero = check_input(check, "zero", 128 * sizeof *zero, 64);
    for (uint32_t j = 0; j < 128; j++) {
        scale[j] = 0.5f; /* so x / 2 + 1 stays finite when it is repeated */
        zero[j] = 1;
    }
    check_floats(check, tile, 64 * 128, CHECK_NORMAL);
    CHECK_BENCH(check,
                (by_row ? kernels->scale_rows : kernels->scale_columns)(tile, 64, 128, scale, zero),
                "64 x 128");
}

CHECK(scale_columns)
{
    check_scales(check, kernels, false);
}

CHECK(scale_rows)
{
    check_scales(check, kernels, true);
}

BENCH(scale_columns)
{
    bench_scales(check, kernels, false);
}

BENCH(scale_rows)
{
    bench_scales(check, kernels, true);
}
