/* check_code_dots.c - attention on codes: products of codes and integers, which are exact, and the
 * conversions between numbers and integers (bounds of kernels.h). */
#include "check.h"

#define MAX_VECTORS 28u /* some blocks of the widest kernel and a remainder */

/* A page of codes with band_tiles row tiles per band, multiplied in column tiles first .. end - 1.
 * 0: all. */
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
    /* rows in bands */
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

typedef struct dot_case {
    kvant_layout layout;
    kvant_code_factors factors;
    uint32_t n;
    size_t dots_stride;
    uint32_t *page;
    int16_t *values, *x;
    int32_t *got;
} dot_case;

/* The values of a problem. CODEBOOK_DOTS: the codebooks' largest value in all codes, and the
 * largest integers with alternating signs. LARGEST_DOTS: the largest value that kernels.h
 * allows. */
typedef enum dots_kind { ANY_DOTS, CODEBOOK_DOTS, LARGEST_DOTS, N_DOTS_KINDS } dots_kind;

/* Fills values of the low digit and, for codes of more than 4 bits, of the high digit. Returns the
 * largest magnitude of a code's value. */
static int32_t fill_values(checker *check, uint32_t bits, dots_kind kind, int16_t *values)
{
    int32_t largest = kind == CODEBOOK_DOTS ? 4095
                      : kind == LARGEST_DOTS
                          ? KVANT_CODE_OPERAND_MAX
                          : 2 + (int32_t)check_below(check, KVANT_CODE_OPERAND_MAX - 1);
    int32_t limits[2] = { bits > 4 ? (largest + 1) / 2 : largest, largest / 2 };
    for (uint32_t i = 0; i < KVANT_CODE_VALUES; i++) {
        int32_t limit = limits[i / 16];
        values[i] = (int16_t)(kind != ANY_DOTS
                                  ? i % 4 == 1 ? -limit : limit
                                  : (int32_t)check_below(check, 2 * (uint32_t)limit + 1) - limit);
    }
    return largest;
}

static dot_case make_dots(checker *check, const shape *s, uint32_t bits, uint32_t n, dots_kind kind)
{
    dot_case p = { .n = n };
    check_case(check,
               "role %d, head_dim %u, bands of %u, columns %u to %u, %u bits, %u vectors, kind %d",
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
    for (size_t i = 0; i < n_x;
         i++) { /* also columns that the page lacks: no result may depend on them */
        int32_t number = (int32_t)check_below(check, 2 * (uint32_t)limit + 1) - limit;
        p.x[i] = (int16_t)(kind == ANY_DOTS ? number : i / width % 2 ? -limit : limit);
    }
    return p;
}

/* Position of row i in dots and of column i in x. */
static uint32_t position_of(uint32_t i)
{
    return i / 64 * 64 + kvant_token_position(i % 64);
}

/* Values by row, then column, of the codes that the layout's own reader returns. */
static void read_values(const dot_case *p, int16_t *values)
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
static void expect_dots(const dot_case *p, int32_t *want)
{
    static int16_t values[KVANT_MAX_PADDED_DIM * KVANT_PAGE_TOKENS], x[KVANT_MAX_PADDED_DIM];
    const kvant_code_factors *f = &p->factors;
    const uint32_t rows = KVANT_TILE * p->layout.row_tiles,
                   columns = KVANT_TILE * p->layout.column_tiles;
    const uint32_t first = KVANT_TILE * f->first, end = KVANT_TILE * f->end,
                   band_rows = KVANT_TILE * f->band_tiles;
    read_values(p, values);
    for (uint32_t i = 0; i < p->n; i++)
        for (uint32_t row = 0; row < rows; row++) {
            for (uint32_t c = first; c < end && row % band_rows == 0;
                 c++) /* a band's vector, column by column */
                x[c] = p->x[i * f->stride + row / band_rows * f->band_stride + position_of(c)];
            int32_t sum = 0;
            for (uint32_t c = first; c < end; c++)
                sum += values[row * columns + c] * x[c];
            want[i * rows + row] = sum;
        }
}

static void check_dots(checker *check, kvant_code_dots_fn *kernel, const dot_case *p)
{
    static int32_t want[MAX_VECTORS * KVANT_MAX_PADDED_DIM];
    uint32_t rows = 16 * p->layout.row_tiles;
    if (check_compares(check))
        expect_dots(p, want);
    CHECK_CALL(check,
               kernel(&p->layout, p->page, p->values, &p->factors, p->got, p->dots_stride, p->n));
    for (uint32_t i = 0; i < p->n; i++)
        for (uint32_t row = 0; row < rows; row++)
            check_same(check, "dot", p->got + i * p->dots_stride + position_of(row),
                       want + i * rows + row, 1, sizeof *want);
    for (uint32_t i = 0; i + 1 < p->n; i++) /* memory between vectors belongs to the caller */
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
                    dot_case p = make_dots(check, &shapes[i], bits, vectors[v], (dots_kind)kind);
                    check_dots(check, kernel, &p);
                }
}

static void bench_dots(checker *check, kvant_code_dots_fn *kernel, const shape *s, uint32_t bits,
                       uint32_t n)
{
    dot_case p = make_dots(check, s, bits, n, ANY_DOTS);
    CHECK_BENCH(check, kernel(&p.layout, p.page, p.values, &p.factors, p.got, p.dots_stride, n),
                "%s, head_dim %u, bands of %u, %u bits, n %u", s->role == KVANT_ROLE_K ? "K" : "V",
                s->dim, s->band_tiles, bits, n);
}

static void bench_all_dots(checker *check, kvant_code_dots_fn *kernel, uint32_t first,
                           uint32_t last)
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
    check_all_dots(check, kernels->code_dots);
}

BENCH(code_dots)
{
    bench_all_dots(check, kernels->code_dots, 1, 4);
}

/* How dots become scores or sums: the kind of scales, in bands as the factors are. */
typedef enum lines_kind {
    BY_ROW,              /* rows have scales */
    BY_ROW_WITH_ZEROS,   /* rows also have zero points */
    BY_COLUMN,           /* only bands have steps */
    BY_COLUMN_WITH_SUMS, /* also with the sums of zero points */
    N_LINES_KINDS
} lines_kind;

typedef struct code_sums {
    kvant_code_sums out;
    float *got, *before; /* n x stride */
} code_sums;

/* n vectors with the sums of a layout's rows; band_tiles as in factors. */
static code_sums make_sums(checker *check, const kvant_layout *layout, uint32_t band_tiles,
                           uint32_t n, lines_kind kind, bool add)
{
    static float before[MAX_VECTORS * (KVANT_MAX_PADDED_DIM + 16)];
    bool by_row = kind <= BY_ROW_WITH_ZEROS, zeros = kind == BY_ROW_WITH_ZEROS,
         offsets = kind % 2 == 1;
    uint32_t bands = by_row ? 1 : (layout->row_tiles + band_tiles - 1) / band_tiles;
    uint32_t positions = (layout->row_tiles + 3) / 4 * 64, rows = KVANT_TILE * layout->row_tiles;
    size_t stride = rows + (n % 2 ? 0 : 16), n_sums = (n - 1) * stride + rows;
    float *scale = by_row ? check_input(check, "scale", positions * sizeof *scale, 64) : NULL;
    float *zero = zeros ? check_input(check, "zero", positions * sizeof *zero, 64) : NULL;
    float *steps = check_input(check, "steps", n * bands * sizeof *steps, sizeof *steps);
    float *offset =
        offsets ? check_input(check, "offsets", n * bands * sizeof *offset, sizeof *offset) : NULL;
    float *sums = check_output(check, "sums", n_sums * sizeof *sums, 64);
    if (by_row)
        check_floats(check, scale, positions, CHECK_NORMAL);
    if (zeros)
        check_floats(check, zero, positions, CHECK_NORMAL);
    if (offsets)
        check_floats(check, offset, n * bands, CHECK_AWKWARD);
    check_floats(check, steps, n * bands, CHECK_NORMAL);
    if (add)
        check_floats(check, sums, n_sums, n % 2 ? CHECK_AWKWARD : CHECK_NORMAL);
    for (size_t i = 0; i < n_sums; i++)
        before[i] = add ? sums[i] : 0;
    return (code_sums){ { scale, zero, steps, offset, bands,
                          by_row ? layout->row_tiles : band_tiles, add, sums, stride },
                        sums,
                        before };
}

/* Checks vector i, whose dots by row are the exact products. */
static void check_vector(checker *check, const kvant_layout *layout, const code_sums *s, uint32_t i,
                         const int32_t *dots)
{
    const kvant_code_sums *o = &s->out;
    for (uint32_t row = 0; row < KVANT_TILE * layout->row_tiles; row++) {
        size_t at = i * o->stride + kvant_layout_row_position(layout, row),
               place = position_of(row);
        size_t band = (size_t)i * o->n_bands + row / KVANT_TILE / o->band_tiles;
        double first = (double)dots[row] * o->steps[band] * (o->scale ? o->scale[place] : 1);
        double second = o->offsets ? (double)o->offsets[band] * (o->zero ? o->zero[place] : 1) : 0;
        check_near(check, "sum", (uint32_t)at, s->got[at], s->before[at] + first + second,
                   5 * check_rounding(first) + 3 * check_rounding(second) +
                       2 * check_rounding(s->before[at]));
    }
}

static void check_dot_sums(checker *check, const kvant_kernels *kernels, const shape *s, uint32_t n,
                           lines_kind kind, uint32_t round)
{
    static int32_t by_row[KVANT_MAX_PADDED_DIM];
    kvant_layout layout;
    check_case(check, "head_dim %u, bands of %u, %u vectors, kind %d, round %u", s->dim,
               s->band_tiles, n, (int)kind, round);
    kvant_layout_init(&layout, s->role, s->dim, 4);
    uint32_t positions = (layout.row_tiles + 3) / 4 * 64;
    size_t stride = positions + 16 * (n % 2);
    int32_t *dots = check_input(check, "dots", n * stride * sizeof *dots, 64);
    code_sums sums = make_sums(check, &layout, s->band_tiles ? s->band_tiles : layout.row_tiles, n,
                               kind, round % 2);
    for (size_t i = 0; i < n * stride; i++)
        dots[i] = round == 0   ? INT32_MAX
                  : round == 1 ? INT32_MIN
                               : (int32_t)(uint32_t)(check_random(check) >> (32 + round % 30));
    CHECK_CALL(check, kernels->sum_dots(&layout, dots, stride, &sums.out, n));
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t row = 0; row < KVANT_TILE * layout.row_tiles; row++)
            by_row[row] = dots[i * stride + position_of(row)];
        check_vector(check, &layout, &sums, i, by_row);
    }
}

CHECK(sum_dots)
{
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (uint32_t n = 1; n <= 3 && !shapes[i].end; n++)
            for (int kind = 0; kind < N_LINES_KINDS; kind++)
                for (uint32_t round = 0; round < 6; round++)
                    check_dot_sums(check, kernels, &shapes[i], n, (lines_kind)kind, round);
}

BENCH(sum_dots)
{
    for (uint32_t n = 1; n <= 4; n *= 4)
        for (int kind = 0; kind < N_LINES_KINDS; kind++) {
            kvant_layout layout;
            check_case(check, "bench");
            kvant_layout_init(&layout, KVANT_ROLE_V, 128, 4);
            int32_t *dots = check_input(check, "dots", n * 128 * sizeof *dots, 64);
            code_sums sums = make_sums(check, &layout, layout.row_tiles, n, (lines_kind)kind, true);
            CHECK_BENCH(check, kernels->sum_dots(&layout, dots, 128, &sums.out, n),
                        "128, kind %d, n %u", kind, n);
        }
}

/* Whether no band begins or ends within 4 row tiles. */
static bool suits_tiles(const shape *s)
{
    uint32_t row_tiles = s->role == KVANT_ROLE_K ? 4 : (s->dim + 15) / 16;
    return s->band_tiles % 4 == 0 || s->band_tiles >= row_tiles;
}

static void check_tile(checker *check, const kvant_kernels *kernels, const dot_case *p,
                       lines_kind kind, bool add)
{
    static int32_t want[MAX_VECTORS * KVANT_MAX_PADDED_DIM];
    uint32_t rows = KVANT_TILE * p->layout.row_tiles;
    code_sums s = make_sums(check, &p->layout, p->factors.band_tiles, p->n, kind, add);
    if (check_compares(check))
        expect_dots(p, want);
    CHECK_CALL(check, kernels->tile_sums(&p->layout, p->page, p->values, &p->factors, p->got,
                                         p->dots_stride, &s.out, p->n));
    for (uint32_t i = 0; i < p->n && check_compares(check); i++)
        check_vector(check, &p->layout, &s, i, want + (size_t)i * rows);
}

CHECK(tile_sums)
{
    static const uint32_t vectors[] = { 1, 6, 12, 2, 3, 4, 5, 7, 8, 9, 13, 14, MAX_VECTORS };
    uint32_t turn = 0;
    for (uint32_t bits = 1; bits <= 8; bits++)
        for (size_t v = 0; v < (bits == 4 ? COUNT(vectors) : 3); v++)
            for (int kind = 0; kind < (vectors[v] % 4 == 0 ? N_DOTS_KINDS : 1); kind++)
                for (size_t i = 0; i < COUNT(shapes); i++)
                    for (uint32_t lines = 0; lines < N_LINES_KINDS && suits_tiles(&shapes[i]);
                         lines++) {
                        dot_case p =
                            make_dots(check, &shapes[i], bits, vectors[v], (dots_kind)kind);
                        check_tile(check, kernels, &p, (lines_kind)lines, turn++ % 2);
                    }
}

static void bench_tile(checker *check, const kvant_kernels *kernels, const shape *s, uint32_t bits,
                       uint32_t n)
{
    bool key = s->role == KVANT_ROLE_K;
    dot_case p = make_dots(check, s, bits, n, ANY_DOTS);
    code_sums sums =
        make_sums(check, &p.layout, p.factors.band_tiles, n, key ? BY_ROW : BY_COLUMN, !key);
    CHECK_BENCH(check,
                kernels->tile_sums(&p.layout, p.page, p.values, &p.factors, p.got, p.dots_stride,
                                   &sums.out, n),
                "%s, head_dim %u, %u bits, n %u", key ? "K" : "V", s->dim, bits, n);
}

BENCH(tile_sums)
{
    static const shape benched[] = { { KVANT_ROLE_K, 128, 0, 0, 0 },
                                     { KVANT_ROLE_V, 128, 0, 0, 0 } };
    for (uint32_t bits = 3; bits <= 8; bits += bits == 3 ? 1 : 4)
        for (uint32_t n = 4; n <= 64; n *= 4)
            for (size_t i = 0; i < COUNT(benched); i++)
                bench_tile(check, kernels, &benched[i], bits, n < 64 ? n : MAX_VECTORS);
}

#define N_KINDS 9u

/* Weights of many sizes, ties between integers, zeros, and the tiny and infinite numbers of
 * fixed_point.h. */
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
        case 8: w[i] = i % 2 ? -1 : 1; break; /* all the largest, with different scales */
        default: break;
        }
    }
}

typedef struct integers {
    kvant_fixed_rows rows;
    uint32_t n, n_rows;
} integers;

static integers make_integers(checker *check, uint32_t n, uint32_t n_rows, int32_t limit,
                              uint32_t kind, bool scaled)
{
    integers p = { .n = n, .n_rows = n_rows };
    float unused[KVANT_MAX_HEAD_DIM];
    size_t x_stride = n + 32 * (n_rows % 2), line_stride = 1 + n_rows % 3;
    float *w = check_input(check, "w", n_rows * n * sizeof *w, 64);
    float *scale = scaled ? check_input(check, "scale", n * sizeof *scale, 64) : NULL;
    float *zero = kind % 2 ? check_input(check, "zero", n * sizeof *zero, 64) : NULL;
    for (uint32_t i = 0; i < n_rows * n; i += 64) /* the last row has scales of its kind */
        fill_weights(check, w + i, scaled ? scale + i % n : unused,
                     i % n ? 0 : (kind + n_rows - 1 - i / n) % N_KINDS);
    if (zero)
        check_floats(check, zero, n, CHECK_NORMAL);
    p.rows = (kvant_fixed_rows){
        .w = w,
        .scale = scale,
        .zero = zero,
        .limit = limit,
        .x = check_output(check, "x", ((n_rows - 1) * x_stride + n) * sizeof *p.rows.x, 64),
        .x_stride = x_stride,
        .line_stride = line_stride,
        .steps = check_output(check, "steps",
                              ((n_rows - 1) * line_stride + 1) * sizeof *p.rows.steps, 4),
        .zeros = check_output(check, "zeros",
                              ((n_rows - 1) * line_stride + 1) * sizeof *p.rows.zeros, 4),
        .sums = n_rows % 4
                    ? check_output(check, "sums", n_rows * (n / 16) * sizeof *p.rows.sums, 16)
                    : NULL,
    };
    return p;
}

static float product_of(const integers *p, uint32_t i, uint32_t j)
{
    float w = p->rows.w[i * p->n + j];
    return p->rows.scale ? w * p->rows.scale[j] : w;
}

static void check_integers(checker *check, const integers *p, uint32_t i)
{
    const int16_t *x = p->rows.x + i * p->rows.x_stride;
    float step = p->rows.steps[i * p->rows.line_stride], largest = 0;
    int32_t sums[KVANT_MAX_HEAD_DIM / 16] = { 0 }, limit = p->rows.limit;
    bool finite = true;
    for (uint32_t j = 0; j < p->n; j++) {
        sums[j / 64 * 4 + j % 4] += x[j];
        finite &= isfinite(product_of(p, i, j));
        largest = fmaxf(largest, fabsf(product_of(p, i, j)));
    }
    if (p->rows.sums)
        check_same(check, "sums", p->rows.sums + i * (p->n / 16), sums, p->n / 16, sizeof *sums);
    if (!finite ? !isnan(step) : largest < 0x1p-110f ? step != 0 : !(step > 0))
        check_fail(check, "step is %g", (double)step);
    double bound = (0.5 + limit * 0x1p-22) * step;
    for (uint32_t j = 0; j < p->n; j++)
        if (!(step > 0) || x[j] > limit || x[j] < -limit)
            check_near(check, "x", j, x[j], 0, step > 0 ? limit : 0);
        else
            check_near(check, "step x", j, (double)step * x[j],
                       (double)p->rows.w[i * p->n + j] * (p->rows.scale ? p->rows.scale[j] : 1),
                       bound);
}

static void check_zeros(checker *check, const integers *p, uint32_t i)
{
    double sum = 0, magnitudes = 0;
    for (uint32_t j = 0; j < p->n && p->rows.zero; j++) {
        double product = (double)p->rows.w[i * p->n + j] * p->rows.zero[j];
        sum += product;
        magnitudes += fabs(product);
    }
    if (isfinite(sum) && magnitudes < 1e38)
        check_near(check, "zeros", i, p->rows.zeros[i * p->rows.line_stride], sum,
                   p->n * 0x1p-24 * pow(1 + 0x1p-23, p->n) * magnitudes + p->n * 0x1p-149);
}

static void check_rows(checker *check, const kvant_kernels *kernels, const kvant_kernels *c,
                       const integers *p)
{
    static int16_t x[MAX_VECTORS * (KVANT_MAX_HEAD_DIM + 32)];
    static int32_t sums[MAX_VECTORS * KVANT_MAX_HEAD_DIM / 16];
    float steps[3 * MAX_VECTORS], zeros[3 * MAX_VECTORS];
    kvant_fixed_rows want = p->rows;
    want.x = x;
    want.sums = sums;
    want.steps = steps;
    want.zeros = zeros;
    c->fixed_point(&want, p->n, p->n_rows);
    CHECK_CALL(check, kernels->fixed_point(&p->rows, p->n, p->n_rows));
    for (uint32_t i = 0; i < p->n_rows; i++) {
        float got = p->rows.steps[i * p->rows.line_stride],
              expected = steps[i * p->rows.line_stride];
        check_integers(check, p, i);
        check_zeros(check, p, i);
        check_same(check, "x", p->rows.x + i * p->rows.x_stride, x + i * p->rows.x_stride, p->n,
                   sizeof *x);
        if (got != expected && !(isnan(got) && isnan(expected)))
            check_fail(check, "step is %.9g, not %.9g", (double)got, (double)expected);
    }
}

CHECK(fixed_point)
{
    static const int32_t limits[] = { 8191, KVANT_CODE_OPERAND_MAX, 1023, 1 };
    static const uint32_t lengths[] = { 64, 128, 192, 512 };
    static const uint32_t rows[] = { 1, 2, 8, 3, 9, MAX_VECTORS };
    for (uint32_t round = 0; round < 8 * N_KINDS; round++)
        for (size_t l = 0; l < COUNT(limits); l++) {
            uint32_t n = lengths[(round + l) % COUNT(lengths)],
                     n_rows = rows[(round / 2 + l) % COUNT(rows)];
            bool scaled = round / N_KINDS % 4 != 0;
            check_case(check, "%u rows of %u numbers, limit %d, kind %u, round %u%s", n_rows, n,
                       (int)limits[l], round % N_KINDS, round / N_KINDS,
                       scaled ? "" : ", no scale");
            integers p = make_integers(check, n, n_rows, limits[l], round % N_KINDS, scaled);
            check_rows(check, kernels, c, &p);
        }
}

BENCH(fixed_point)
{
    for (uint32_t n = 64; n <= 128; n += 64)
        for (uint32_t rows = 1; rows <= 16; rows *= 16) {
            check_case(check, "bench");
            integers p = make_integers(check, n, rows, 8191, 1, true);
            CHECK_BENCH(check, kernels->fixed_point(&p.rows, n, rows), "%u, %u rows", n, rows);
        }
}
