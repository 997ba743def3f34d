/* check_code_dots.c - attention on codes: products of codes and integers (exact), and the steps from numbers to integers and
 * back (bounds of kernels.h). */
#include "check.h"

#define MAX_VECTORS 28u /* some blocks of the widest kernel and a rest */

/* A page of codes, of band_tiles row tiles a band, multiplied in column tiles first .. end - 1; 0: all there are. */
typedef struct shape {
    kvant_role role;
    uint32_t dim, band_tiles, first, end;
} shape;

static const shape shapes[] = {
    { KVANT_ROLE_K, 16, 0, 0, 0 },
    { KVANT_ROLE_K, 40, 0, 0, 0 },
    { KVANT_ROLE_K, 64, 0, 0, 0 },
    { KVANT_ROLE_K, 80, 0, 0, 0 },
    { KVANT_ROLE_K, 128, 0, 0, 0 },
    { KVANT_ROLE_K, 256, 0, 0, 0 },
    { KVANT_ROLE_K, 512, 0, 0, 0 },
    { KVANT_ROLE_V, 64, 0, 0, 0 },
    { KVANT_ROLE_V, 128, 0, 0, 0 },
    { KVANT_ROLE_V, 192, 0, 0, 0 },
    { KVANT_ROLE_V, 512, 0, 0, 0 },
    /* a row group of fewer than 4 tiles */
    { KVANT_ROLE_V, 16, 0, 0, 0 },
    { KVANT_ROLE_V, 80, 0, 0, 0 },
    { KVANT_ROLE_V, 96, 0, 0, 0 },
    { KVANT_ROLE_V, 112, 0, 0, 0 },
    /* bands of rows */
    { KVANT_ROLE_K, 64, 1, 0, 0 },
    { KVANT_ROLE_K, 128, 2, 0, 0 },
    { KVANT_ROLE_K, 80, 4, 0, 0 },
    { KVANT_ROLE_V, 128, 2, 0, 0 },
    { KVANT_ROLE_V, 128, 4, 0, 0 },
    { KVANT_ROLE_V, 192, 3, 0, 0 },
    { KVANT_ROLE_V, 112, 1, 0, 0 },
    { KVANT_ROLE_V, 80, 2, 0, 0 },
    { KVANT_ROLE_V, 192, 8, 0, 0 },
    /* a part of the columns */
    { KVANT_ROLE_K, 128, 0, 2, 4 },
    { KVANT_ROLE_K, 256, 0, 5, 16 },
    { KVANT_ROLE_K, 80, 0, 4, 5 },
    { KVANT_ROLE_V, 64, 0, 1, 2 },
    { KVANT_ROLE_V, 96, 0, 2, 4 },
    { KVANT_ROLE_V, 128, 0, 0, 1 },
};

typedef struct dots {
    kvant_layout layout;
    kvant_code_factors factors;
    uint32_t n;
    size_t dots_stride;
    uint32_t *page;
    int16_t *values, *x;
    int32_t *got;
} dots;

/* What a problem is made of: anything; the codebooks' largest value in all codes and the largest integers beside it, signs
 * alternately; the largest value that kernels.h allows. */
typedef enum dots_kind { ANY_DOTS, CODEBOOK_DOTS, LARGEST_DOTS, N_DOTS_KINDS } dots_kind;

/* Values of the low and, of codes of more than 4 bits, of the high digit; returns the largest magnitude of a code's. */
static int32_t fill_values(checker *check, uint32_t bits, dots_kind kind, int16_t *values)
{
    int32_t largest = kind == CODEBOOK_DOTS  ? 4095
                      : kind == LARGEST_DOTS ? KVANT_CODE_OPERAND_MAX
                                             : 2 + (int32_t)check_below(check, KVANT_CODE_OPERAND_MAX - 1);
    int32_t limits[2] = { bits > 4 ? (largest + 1) / 2 : largest, largest / 2 };
    for (uint32_t i = 0; i < KVANT_CODE_VALUES; i++) {
        int32_t limit = limits[i / 16];
        values[i] = (int16_t)(kind != ANY_DOTS ? i % 4 == 1 ? -limit : limit
                                               : (int32_t)check_below(check, 2 * (uint32_t)limit + 1) - limit);
    }
    return largest;
}

static dots make_dots(checker *check, const shape *s, uint32_t bits, uint32_t n, dots_kind kind)
{
    dots p = { .n = n };
    check_case(check, "role %d, head_dim %u, bands of %u, columns %u to %u, %u bits, %u vectors, kind %d",
               (int)s->role, s->dim, s->band_tiles, s->first, s->end, bits, n, (int)kind);
    kvant_layout_init(&p.layout, s->role, s->dim, bits);
    uint32_t columns = 16 * p.layout.column_tiles, width = (columns + 63) / 64 * 64;
    uint32_t band_tiles = s->band_tiles ? s->band_tiles : p.layout.row_tiles;
    uint32_t bands = (p.layout.row_tiles + band_tiles - 1) / band_tiles;
    size_t positions = (size_t)(p.layout.row_tiles + 3) / 4 * 64, n_x = (size_t)n * bands * width;
    p.dots_stride = positions + (n > 1 && kind == ANY_DOTS ? 16 : 0);
    p.page = check_input(check, "page", p.layout.code_bytes, 64);
    p.values = check_input(check, "values", KVANT_CODE_VALUES * sizeof *p.values, 2);
    p.x = check_input(check, "x", n_x * sizeof *p.x, 64);
    p.got = check_output(check, "dots", ((n - 1) * p.dots_stride + positions) * sizeof *p.got, 64);
    p.factors = (kvant_code_factors){ p.x,      (size_t)bands * width,
                                      width,    band_tiles,
                                      s->first, s->end ? s->end : p.layout.column_tiles };
    check_bytes(check, p.page, p.layout.code_bytes, kind != ANY_DOTS ? 0xff : -1);
    int32_t limit = INT32_MAX / (fill_values(check, bits, kind, p.values) * (int32_t)columns);
    limit = limit < KVANT_CODE_OPERAND_MAX ? limit : KVANT_CODE_OPERAND_MAX;
    for (size_t i = 0; i < n_x; i++) { /* columns that a page lacks, too: nothing may depend on them */
        int32_t number = (int32_t)check_below(check, 2 * (uint32_t)limit + 1) - limit;
        p.x[i] = (int16_t)(kind == ANY_DOTS ? number : i / width % 2 ? -limit : limit);
    }
    return p;
}

/* Where rows lie in dots and columns in x. */
static uint32_t position_of(uint32_t i)
{
    return i / 64 * 64 + kvant_token_position(i % 64);
}

/* Values by row, then column, from codes as the layout's own reader gives them. */
static void read_values(const dots *p, int16_t *values)
{
    uint8_t codes[KVANT_MAX_PADDED_DIM];
    bool key = p->layout.role == KVANT_ROLE_K;
    uint32_t columns = KVANT_TILE * p->layout.column_tiles;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        kvant_layout_get(&p->layout, p->page, t, codes);
        for (uint32_t j = 0; j < p->layout.padded_dim; j++) {
            uint32_t row = key ? t : j, column = key ? j : t;
            int32_t high = p->layout.bits > 4 ? p->values[16 + codes[j] / 16] : 0;
            values[row * columns + column] = (int16_t)(p->values[codes[j] % 16] + high);
        }
    }
}

/* want: n x rows. */
static void expect_dots(const dots *p, int32_t *want)
{
    static int16_t values[KVANT_MAX_PADDED_DIM * KVANT_PAGE_TOKENS];
    const kvant_code_factors *f = &p->factors;
    uint32_t rows = KVANT_TILE * p->layout.row_tiles, columns = KVANT_TILE * p->layout.column_tiles;
    read_values(p, values);
    for (uint32_t i = 0; i < p->n; i++)
        for (uint32_t row = 0; row < rows; row++) {
            const int16_t *x = p->x + i * f->stride + row / KVANT_TILE / f->band_tiles * f->band_stride;
            int32_t sum = 0;
            for (uint32_t c = KVANT_TILE * f->first; c < KVANT_TILE * f->end; c++)
                sum += values[row * columns + c] * x[position_of(c)];
            want[i * rows + row] = sum;
        }
}

static void check_dots(checker *check, kvant_code_dots_fn *kernel, const dots *p)
{
    static int32_t want[MAX_VECTORS * KVANT_MAX_PADDED_DIM];
    uint32_t rows = 16 * p->layout.row_tiles;
    if (check_compares(check))
        expect_dots(p, want);
    CHECK_CALL(check, kernel(&p->layout, p->page, p->values, &p->factors, p->got, p->dots_stride, p->n));
    for (uint32_t i = 0; i < p->n; i++)
        for (uint32_t row = 0; row < rows; row++)
            check_same(check, "dot", p->got + i * p->dots_stride + position_of(row), want + i * rows + row, 1,
                       sizeof *want);
    for (uint32_t i = 0; i + 1 < p->n; i++) /* what lies between vectors is the caller's */
        for (size_t at = (p->layout.row_tiles + 3) / 4 * 64; at < p->dots_stride; at++)
            if (p->got[i * p->dots_stride + at] != 0x55555555)
                check_fail(check, "writes behind the dots of vector %u", i);
}

static void check_all_dots(checker *check, kvant_code_dots_fn *kernel)
{
    static const uint32_t vectors[] = { 1, 4, 6, 12, 2, 3, 5, 7, 8, 9, 13, 14, MAX_VECTORS };
    for (uint32_t bits = 1; bits <= 8; bits++)
        for (size_t v = 0; v < (bits == 4 ? COUNT(vectors) : 4); v++)
            for (int kind = 0; kind < (vectors[v] % 4 == 0 ? N_DOTS_KINDS : 1); kind++)
                for (size_t i = 0; i < COUNT(shapes); i++) {
                    dots p = make_dots(check, &shapes[i], bits, vectors[v], (dots_kind)kind);
                    check_dots(check, kernel, &p);
                }
}

static void bench_dots(checker *check, kvant_code_dots_fn *kernel, const shape *s, uint32_t bits, uint32_t n)
{
    dots p = make_dots(check, s, bits, n, ANY_DOTS);
    CHECK_BENCH(check, kernel(&p.layout, p.page, p.values, &p.factors, p.got, p.dots_stride, n),
                "%s, head_dim %u, bands of %u, %u bits, n %u", s->role == KVANT_ROLE_K ? "K" : "V", s->dim,
                s->band_tiles, bits, n);
}

static void bench_all_dots(checker *check, kvant_code_dots_fn *kernel, uint32_t first, uint32_t last)
{
    static const shape benched[] = { { KVANT_ROLE_K, 128, 0, 0, 0 },
                                     { KVANT_ROLE_V, 128, 0, 0, 0 },
                                     { KVANT_ROLE_V, 128, 2, 0, 0 } };
    static const uint32_t bits[] = { 3, 4, 8 };
    for (size_t b = 0; b < COUNT(bits); b++)
        for (uint32_t n = first; n <= last; n *= 4)
            for (size_t i = 0; i < COUNT(benched); i++)
                if (i < 2 || bits[b] == 4)
                    bench_dots(check, kernel, &benched[i], bits[b], n);
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

typedef struct integers {
    float *w, *scale; /* scale: NULL for ones */
    uint32_t n;
    int32_t limit;
    int16_t *x;
    int32_t *sums;
} integers;

static integers make_integers(checker *check, uint32_t n, int32_t limit, uint32_t kind, bool scaled)
{
    float unused[64];
    integers p = { .n = n, .limit = limit };
    p.w = check_input(check, "w", n * sizeof *p.w, 64);
    p.scale = scaled ? check_input(check, "scale", n * sizeof *p.scale, 64) : NULL;
    p.x = check_output(check, "x", n * sizeof *p.x, 64);
    p.sums = check_output(check, "sums", n / 16 * sizeof *p.sums, 16);
    for (uint32_t i = 0; i < n; i += 64)
        fill_weights(check, p.w + i, scaled ? p.scale + i : unused, i ? 0 : kind);
    return p;
}

static float product_of(const integers *p, uint32_t i)
{
    return p->scale ? p->w[i] * p->scale[i] : p->w[i];
}

static void check_integers(checker *check, const integers *p, float step)
{
    int32_t sums[KVANT_MAX_HEAD_DIM / 16] = { 0 };
    float largest = 0;
    bool finite = true;
    for (uint32_t i = 0; i < p->n; i++) {
        sums[i / 64 * 4 + i % 4] += p->x[i];
        finite &= isfinite(product_of(p, i));
        largest = fmaxf(largest, fabsf(product_of(p, i)));
    }
    check_same(check, "sums", p->sums, sums, p->n / 16, sizeof *sums);
    if (!finite ? !isnan(step) : largest < 0x1p-110f ? step != 0 : !(step > 0))
        check_fail(check, "step is %g", (double)step);
    double bound = (0.5 + p->limit * 0x1p-22) * step;
    for (uint32_t i = 0; i < p->n; i++)
        if (!(step > 0) || p->x[i] > p->limit || p->x[i] < -p->limit)
            check_near(check, "x", i, p->x[i], 0, step > 0 ? p->limit : 0);
        else
            check_near(check, "step x", i, (double)step * p->x[i], (double)p->w[i] * (p->scale ? p->scale[i] : 1),
                       bound);
}

CHECK(fixed_point)
{
    static const int32_t limits[] = { 8191, KVANT_CODE_OPERAND_MAX, 1023, 1 };
    static const uint32_t lengths[] = { 64, 128, 192, 512 };
    int16_t want[KVANT_MAX_HEAD_DIM];
    int32_t sums[KVANT_MAX_HEAD_DIM / 16];
    for (uint32_t round = 0; round < 8 * N_KINDS; round++)
        for (size_t l = 0; l < COUNT(limits); l++) {
            uint32_t n = lengths[(round + l) % COUNT(lengths)];
            bool scaled = round / N_KINDS % 4 != 0;
            check_case(check, "%u numbers, limit %d, kind %u, round %u%s", n, (int)limits[l], round % N_KINDS,
                       round / N_KINDS, scaled ? "" : ", no scale");
            integers p = make_integers(check, n, limits[l], round % N_KINDS, scaled);
            float got = 0, expected = c->fixed_point(p.w, p.scale, n, p.limit, want, sums);
            CHECK_CALL(check, got = kernels->fixed_point(p.w, p.scale, n, p.limit, p.x, p.sums));
            check_integers(check, &p, got);
            check_same(check, "x", p.x, want, n, sizeof *want);
            if (got != expected && !(isnan(got) && isnan(expected)))
                check_fail(check, "step is %.9g, not %.9g", (double)got, (double)expected);
        }
}

BENCH(fixed_point)
{
    volatile float step = 0;
    for (uint32_t n = 64; n <= 128; n += 64) {
        check_case(check, "bench");
        integers p = make_integers(check, n, 8191, 0, true);
        CHECK_BENCH(check, step = kernels->fixed_point(p.w, p.scale, n, p.limit, p.x, p.sums), "%u", n);
    }
    (void)step;
}

/* Sums of the rows of V with dim channels, or of K. */
typedef struct row_sums {
    kvant_layout layout;
    int32_t *dots;
    float *scale, *zero; /* of rows, in the order of dots, or of row tiles */
    float *sums, before[KVANT_MAX_PADDED_DIM];
} row_sums;

static row_sums make_sums(checker *check, uint32_t dim, bool of_tiles, uint32_t round)
{
    row_sums p;
    kvant_layout_init(&p.layout, dim ? KVANT_ROLE_V : KVANT_ROLE_K, dim ? dim : 64, 4);
    uint32_t groups = (p.layout.row_tiles + 3) / 4, n = groups * (of_tiles ? 4 : 64),
             rows = 16 * p.layout.row_tiles;
    p.dots = check_input(check, "dots", groups * 64 * sizeof *p.dots, 64);
    p.scale = check_input(check, "scale", n * sizeof *p.scale, of_tiles ? 16 : 64);
    p.zero = check_input(check, "zero", n * sizeof *p.zero, of_tiles ? 16 : 64);
    p.sums = check_output(check, "sums", rows * sizeof *p.sums, 64);
    for (uint32_t i = 0; i < groups * 64; i++)
        p.dots[i] = round == 0   ? INT32_MAX
                    : round == 1 ? INT32_MIN
                                 : (int32_t)(uint32_t)(check_random(check) >> (32 + round % 30));
    check_floats(check, p.scale, n, CHECK_NORMAL);
    check_floats(check, p.zero, n, CHECK_NORMAL);
    check_floats(check, p.sums, rows, round % 2 ? CHECK_AWKWARD : CHECK_NORMAL);
    memcpy(p.before, p.sums, rows * sizeof *p.sums);
    return p;
}

static const uint32_t sum_dims[] = { 0, 16, 64, 80, 96, 112, 128, 160, 192, 512 }; /* 0: K */

static void check_row_dots(checker *check, const kvant_kernels *kernels, uint32_t dim, uint32_t round, bool zeros)
{
    check_case(check, "head_dim %u, round %u%s", dim, round, zeros ? ", zero points" : "");
    row_sums p = make_sums(check, dim, false, round);
    float step = (float)exp(-10 * check_uniform(check)), offset = 100 * check_normal(check);
    CHECK_CALL(check,
               kernels->add_row_dots(&p.layout, p.dots, step, p.scale, offset, zeros ? p.zero : NULL, p.sums));
    for (uint32_t row = 0; row < 16 * p.layout.row_tiles; row++) {
        uint32_t i = position_of(row), at = kvant_layout_row_position(&p.layout, row);
        double first = (double)p.dots[i] * step * p.scale[i], second = zeros ? (double)offset * p.zero[i] : 0;
        check_near(check, "sum", at, p.sums[at], p.before[at] + first + second,
                   5 * check_rounding(first) + 3 * check_rounding(second) + 2 * check_rounding(p.before[at]));
    }
}

CHECK(add_row_dots)
{
    (void)c;
    for (size_t d = 0; d < COUNT(sum_dims); d++)
        for (uint32_t round = 0; round < 32; round++) {
            check_row_dots(check, kernels, sum_dims[d], round, false);
            check_row_dots(check, kernels, sum_dims[d], round, true);
        }
}

BENCH(add_row_dots)
{
    check_case(check, "bench");
    row_sums p = make_sums(check, 0, false, 8);
    CHECK_BENCH(check, kernels->add_row_dots(&p.layout, p.dots, 1e-9f, p.scale, 0, NULL, p.sums), "64");
    CHECK_BENCH(check, kernels->add_row_dots(&p.layout, p.dots, 1e-9f, p.scale, 1e-3f, p.zero, p.sums),
                "64, zero points");
}

CHECK(add_tile_dots)
{
    (void)c;
    for (size_t d = 0; d < COUNT(sum_dims); d++)
        for (uint32_t round = 0; round < 32; round++) {
            check_case(check, "head_dim %u, round %u", sum_dims[d], round);
            row_sums p = make_sums(check, sum_dims[d], true, round);
            CHECK_CALL(check, kernels->add_tile_dots(&p.layout, p.dots, p.scale, p.zero, p.sums));
            for (uint32_t row = 0; row < 16 * p.layout.row_tiles; row++) {
                uint32_t at = kvant_layout_row_position(&p.layout, row);
                double first = (double)p.dots[position_of(row)] * p.scale[row / 16], zero = p.zero[row / 16];
                check_near(check, "sum", at, p.sums[at], p.before[at] + first + zero,
                           4 * (check_rounding(p.before[at]) + check_rounding(first) + check_rounding(zero)));
            }
        }
}

BENCH(add_tile_dots)
{
    check_case(check, "bench");
    row_sums p = make_sums(check, 128, true, 8);
    CHECK_BENCH(check, kernels->add_tile_dots(&p.layout, p.dots, p.scale, p.zero, p.sums), "128");
}
