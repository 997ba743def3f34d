/* check_code_dots.c - attention on codes: products of codes and integers (exact), and the steps from numbers to integers and
 * back (bounds of kernels.h). */
#include "check.h"

#define MAX_VECTORS 28u /* some blocks of the widest kernel and a rest */

typedef struct dots {
    kvant_layout layout;
    uint32_t columns, n;
    size_t x_stride, dots_stride;
    uint32_t *page;
    int16_t *values, *x;
    int32_t *got;
} dots;

/* What a problem is made of: anything; the codebooks' largest value in all codes and the largest integers beside it, signs
 * alternately; the largest value that kernels.h allows. */
typedef enum dots_kind { ANY_DOTS, CODEBOOK_DOTS, LARGEST_DOTS, N_DOTS_KINDS } dots_kind;

static dots make_dots(checker *check, kvant_role role, uint32_t dim, uint32_t bits, uint32_t n, dots_kind kind)
{
    dots p = { .n = n };
    check_case(check, "role %d, head_dim %u, %u bits, %u vectors, kind %d", (int)role, dim, bits, n, (int)kind);
    kvant_layout_init(&p.layout, role, dim, bits);
    p.columns = 16 * p.layout.column_tiles;
    p.x_stride = (p.columns + 63) / 64 * 64;
    p.dots_stride = 16 * p.layout.row_tiles + (n > 1 && kind == ANY_DOTS ? 16 : 0);
    size_t n_dots = (n - 1) * p.dots_stride + 16 * p.layout.row_tiles;
    p.page = check_input(check, "page", p.layout.code_bytes, 64);
    p.values = check_input(check, "values", 16 * sizeof *p.values, 64);
    p.x = check_input(check, "x", n * p.x_stride * sizeof *p.x, 64);
    p.got = check_output(check, "dots", n_dots * sizeof *p.got, 64);
    check_bytes(check, p.page, p.layout.code_bytes, kind != ANY_DOTS ? 0xff : -1);
    int32_t largest = kind == CODEBOOK_DOTS  ? 4095
                      : kind == LARGEST_DOTS ? KVANT_CODE_OPERAND_MAX
                                             : 1 + (int32_t)check_below(check, KVANT_CODE_OPERAND_MAX);
    int32_t limit = INT32_MAX / (largest * (int32_t)p.columns);
    limit = limit < KVANT_CODE_OPERAND_MAX ? limit : KVANT_CODE_OPERAND_MAX;
    for (uint32_t i = 0; i < 16; i++)
        p.values[i] =
            (int16_t)(kind != ANY_DOTS ? i % 4 == 1 ? -largest : largest
                                       : (int32_t)check_below(check, 2 * (uint32_t)largest + 1) - largest);
    memset(p.x, 0, n * p.x_stride * sizeof *p.x);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t column = 0; column < p.columns; column++) {
            int32_t number = (int32_t)check_below(check, 2 * (uint32_t)limit + 1) - limit;
            if (kind != ANY_DOTS)
                number = i % 2 ? -limit : limit;
            p.x[i * p.x_stride + column / 64 * 64 + kvant_token_position(column % 64)] = (int16_t)number;
        }
    return p;
}

/* Values by position of row, then column, from codes as the layout's own reader gives them. */
static void read_values(const dots *p, int16_t *values)
{
    uint8_t codes[KVANT_MAX_PADDED_DIM];
    bool key = p->layout.role == KVANT_ROLE_K;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        kvant_layout_get(&p->layout, p->page, t, codes);
        for (uint32_t j = 0; j < p->layout.padded_dim; j++) {
            uint32_t row = kvant_layout_row_position(&p->layout, key ? t : j), column = key ? j : t;
            values[row * p->columns + column] = p->values[codes[j]];
        }
    }
}

static void expect_dots(const dots *p, int32_t *want)
{
    static int16_t values[KVANT_MAX_PADDED_DIM * KVANT_PAGE_TOKENS];
    int16_t x[KVANT_MAX_PADDED_DIM];
    uint32_t rows = 16 * p->layout.row_tiles;
    read_values(p, values);
    for (uint32_t i = 0; i < p->n; i++) {
        for (uint32_t c = 0; c < p->columns; c++)
            x[c] = p->x[i * p->x_stride + c / 64 * 64 + kvant_token_position(c % 64)];
        for (uint32_t row = 0; row < rows; row++) {
            int32_t sum = 0;
            for (uint32_t c = 0; c < p->columns; c++)
                sum += values[row * p->columns + c] * x[c];
            want[i * rows + row] = sum;
        }
    }
}

static void check_dots(checker *check, kvant_code_dots_fn *kernel, const dots *p)
{
    static int32_t want[MAX_VECTORS * KVANT_MAX_PADDED_DIM];
    uint32_t rows = 16 * p->layout.row_tiles;
    expect_dots(p, want);
    CHECK_CALL(check, kernel(&p->layout, p->page, p->values, p->x, p->x_stride, p->got, p->dots_stride, p->n));
    for (uint32_t i = 0; i < p->n; i++)
        check_same(check, "dots", p->got + i * p->dots_stride, want + i * rows, rows, sizeof *want);
}

static void check_all_dots(checker *check, kvant_code_dots_fn *kernel)
{
    static const uint32_t key_dims[] = { 16, 40, 64, 80, 128, 256, 512 }, value_dims[] = { 64, 128, 192, 512 };
    static const uint32_t vectors[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, MAX_VECTORS };
    for (uint32_t bits = 1; bits <= 4; bits++)
        for (size_t v = 0; v < COUNT(vectors); v++)
            for (int kind = 0; kind < (vectors[v] % 4 == 0 ? N_DOTS_KINDS : 1); kind++)
                for (size_t i = 0; i < COUNT(key_dims) + COUNT(value_dims); i++) {
                    bool key = i < COUNT(key_dims);
                    uint32_t dim = key ? key_dims[i] : value_dims[i - COUNT(key_dims)];
                    dots p =
                        make_dots(check, key ? KVANT_ROLE_K : KVANT_ROLE_V, dim, bits, vectors[v], (dots_kind)kind);
                    check_dots(check, kernel, &p);
                }
}

static void bench_all_dots(checker *check, kvant_code_dots_fn *kernel, uint32_t first, uint32_t last)
{
    static const uint32_t bits[] = { 2, 3, 4 };
    for (size_t b = 0; b < COUNT(bits); b++)
        for (uint32_t n = first; n <= last; n *= 4)
            for (int role = 0; role < 2; role++) {
                dots p = make_dots(check, (kvant_role)role, 128, bits[b], n, ANY_DOTS);
                CHECK_BENCH(check, kernel(&p.layout, p.page, p.values, p.x, p.x_stride, p.got, p.dots_stride, n),
                            "%s, head_dim 128, %u bits, n %u", role == KVANT_ROLE_K ? "K" : "V", bits[b], n);
            }
}

CHECK(code_dots)
{
    (void)c;
    check_all_dots(check, kernels->code_dots);
}

BENCH(code_dots)
{
    bench_all_dots(check, kernels->code_dots, 1, 4);
}

CHECK(tile_dots)
{
    (void)c;
    check_all_dots(check, kernels->tile_dots);
}

BENCH(tile_dots)
{
    bench_all_dots(check, kernels->tile_dots, 4, 64);
}

#define N_KINDS 9u

/* Weights of many sizes, ties between integers, zeros, and what fixed_point.h says of tiny and infinite numbers. */
static void fill_weights(checker *check, float *w, float *scale, uint32_t kind)
{
    for (uint32_t i = 0; i < 64; i++) {
        w[i] = (float)exp(-20 * check_uniform(check));
        scale[i] = kvant_half_to_float(kvant_half_from_float(0.1f + check_uniform(check)));
        switch (kind) {
        case 1: /* step 1: halves */
            w[i] = (float)(i / 2) + 0.5f;
            scale[i] = i == 63 ? 8191 / w[i] : 1;
            break;
        case 2: w[i] = 0; break;
        case 3: w[i] *= 1e-36f; break;
        case 4: w[i] *= i % 3 ? 1 : -1e-4f; break;
        case 5: w[i] = i == 40 ? NAN : w[i]; break;
        case 6: w[i] = i == 9 ? -INFINITY : w[i]; break;
        case 7: w[i] *= 1e34f; break;
        case 8: w[i] = i % 2 ? -1 : 1; break; /* all the largest, scales apart */
        default: break;
        }
    }
}

static void check_integers(checker *check, const float *w, const float *scale, int32_t limit, const int16_t *x,
                           kvant_fixed_point got)
{
    int32_t sum = 0;
    float largest = 0;
    bool finite = true;
    for (uint32_t i = 0; i < 64; i++) {
        sum += x[i];
        finite &= isfinite(w[i] * scale[i]);
        largest = fmaxf(largest, fabsf(w[i] * scale[i]));
    }
    if (sum != got.sum)
        check_fail(check, "sum is %d, not %d", (int)got.sum, (int)sum);
    if (!finite ? !isnan(got.step) : largest < 0x1p-110f ? got.step != 0 : !(got.step > 0))
        check_fail(check, "step is %g", (double)got.step);
    double bound = (0.5 + limit * 0x1p-22) * got.step;
    for (uint32_t i = 0; i < 64; i++)
        if (!(got.step > 0) || x[i] > limit || x[i] < -limit)
            check_near(check, "x", i, x[i], 0, got.step > 0 ? limit : 0);
        else
            check_near(check, "step x", i, (double)got.step * x[i], (double)w[i] * scale[i], bound);
}

CHECK(fixed_point)
{
    static const int32_t limits[] = { 8191, 32767, 1023, 1 };
    for (uint32_t round = 0; round < 8 * N_KINDS; round++)
        for (size_t l = 0; l < COUNT(limits); l++) {
            int16_t want[64];
            check_case(check, "limit %d, kind %u, round %u", (int)limits[l], round % N_KINDS, round / N_KINDS);
            float *w = check_input(check, "w", 64 * sizeof *w, 64);
            float *scale = check_input(check, "scale", 64 * sizeof *scale, 64);
            int16_t *x = check_output(check, "x", 64 * sizeof *x, 64);
            fill_weights(check, w, scale, round % N_KINDS);
            kvant_fixed_point got = { 0, 0 }, expected = c->fixed_point(w, scale, limits[l], want);
            CHECK_CALL(check, got = kernels->fixed_point(w, scale, limits[l], x));
            check_integers(check, w, scale, limits[l], x, got);
            check_same(check, "x", x, want, 64, sizeof *x);
            if (got.step != expected.step && !(isnan(got.step) && isnan(expected.step)))
                check_fail(check, "step is %.9g, not %.9g", (double)got.step, (double)expected.step);
        }
}

BENCH(fixed_point)
{
    volatile float step = 0;
    check_case(check, "bench");
    float *w = check_input(check, "w", 64 * sizeof *w, 64),
          *scale = check_input(check, "scale", 64 * sizeof *w, 64);
    int16_t *x = check_output(check, "x", 64 * sizeof *x, 64);
    fill_weights(check, w, scale, 0);
    CHECK_BENCH(check, step = kernels->fixed_point(w, scale, 8191, x).step, "64");
    (void)step;
}

static void fill_dots(checker *check, int32_t *x, uint32_t n, uint32_t round)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] = round == 0   ? INT32_MAX
               : round == 1 ? INT32_MIN
                            : (int32_t)(uint32_t)(check_random(check) >> (32 + round % 30));
}

static void check_scores(checker *check, const kvant_kernels *kernels, uint32_t round, bool zeros)
{
    check_case(check, "round %u%s", round, zeros ? ", zero points" : "");
    int32_t *products = check_input(check, "dots", 64 * sizeof *products, 64);
    float *scale = check_input(check, "scale", 64 * sizeof *scale, 64);
    float *zero = check_input(check, "zero", 64 * sizeof *zero, 64);
    float *scores = check_output(check, "scores", 64 * sizeof *scores, 64);
    kvant_fixed_point x = { (float)exp(-10 * check_uniform(check)), (int32_t)check_below(check, 1u << 20) };
    fill_dots(check, products, 64, round);
    check_floats(check, scale, 64, CHECK_NORMAL);
    check_floats(check, zero, 64, CHECK_NORMAL);
    CHECK_CALL(check, kernels->scale_dots(products, x, scale, zeros ? zero : NULL, scores));
    for (uint32_t i = 0; i < 64; i++) {
        double first = (double)products[i] * x.step * scale[i],
               second = zeros ? (double)x.step * x.sum * zero[i] : 0;
        check_near(check, "scores", i, scores[i], first + second,
                   4 * check_rounding(first) + 3 * check_rounding(second));
    }
}

CHECK(scale_dots)
{
    (void)c;
    for (uint32_t round = 0; round < 120; round++) {
        check_scores(check, kernels, round, false);
        check_scores(check, kernels, round, true);
    }
}

BENCH(scale_dots)
{
    check_case(check, "bench");
    int32_t *products = check_input(check, "dots", 64 * sizeof *products, 64);
    float *scale = check_input(check, "scale", 64 * sizeof *scale, 64);
    float *scores = check_output(check, "scores", 64 * sizeof *scores, 64);
    fill_dots(check, products, 64, 8);
    check_floats(check, scale, 64, CHECK_NORMAL);
    kvant_fixed_point x = { 1e-3f, 77 };
    CHECK_BENCH(check, kernels->scale_dots(products, x, scale, NULL, scores), "64");
    CHECK_BENCH(check, kernels->scale_dots(products, x, scale, scale, scores), "64, zero points");
}

CHECK(add_dots)
{
    (void)c;
    for (uint32_t n = 16; n <= 512; n += n < 192 ? 16 : 64)
        for (uint32_t round = 0; round < 32; round++) {
            float before[512];
            check_case(check, "%u numbers, round %u", n, round);
            int32_t *products = check_input(check, "dots", n * sizeof *products, 64);
            float *sums = check_output(check, "sums", n * sizeof *sums, 64);
            float step = (float)exp(-10 * check_uniform(check)), zero = check_normal(check);
            fill_dots(check, products, n, round);
            check_floats(check, sums, n, round % 2 ? CHECK_AWKWARD : CHECK_NORMAL);
            memcpy(before, sums, n * sizeof *sums);
            CHECK_CALL(check, kernels->add_dots(products, step, zero, n, sums));
            for (uint32_t i = 0; i < n; i++) {
                double part = (double)products[i] * step;
                check_near(check, "sums", i, sums[i], before[i] + part + zero,
                           4 * (check_rounding(before[i]) + check_rounding(part) + check_rounding(zero)));
            }
        }
}

BENCH(add_dots)
{
    check_case(check, "bench");
    int32_t *products = check_input(check, "dots", 128 * sizeof *products, 64);
    float *sums = check_output(check, "sums", 128 * sizeof *sums, 64);
    fill_dots(check, products, 128, 8);
    check_floats(check, sums, 128, CHECK_NORMAL);
    CHECK_BENCH(check, kernels->add_dots(products, 1e-9f, 0, 128, sums), "128");
}
