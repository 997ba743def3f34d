/* check_sums.c - the encoders' loops over rows: sums in a fixed order, the Hadamard transform,
 * extremes. All results have the same bits at every level, except for the sign of a zero in
 * range. */
#include "check.h"

static const uint32_t lengths[] = { 1,  2,  5,  7,  8,  9,   15,  16,  17,  24, 31,
                                    33, 40, 64, 80, 96, 112, 128, 192, 256, 512 };

CHECK(dot)
{
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (int fill = 0; fill < CHECK_N_FILLS; fill++)
            for (uint32_t round = 0; round < 4; round++) {
                uint32_t n = lengths[l];
                check_case(check, "%u numbers, %s, round %u", n, check_fill_name((check_fill)fill),
                           round);
                float *a = check_input(check, "a", n * sizeof *a, sizeof *a);
                float *b = check_input(check, "b", n * sizeof *b, sizeof *b);
                check_floats(check, a, n, CHECK_NORMAL);
                check_floats(check, b, n, (check_fill)fill);
                float got = 0, want = c->dot(a, b, n);
                CHECK_CALL(check, got = kernels->dot(a, b, n));
                check_same(check, "sum", &got, &want, 1, sizeof got);
            }
}

CHECK(dot_rows)
{
    float want[9];
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (uint32_t n_rows = 0; n_rows < COUNT(want); n_rows++) {
            const uint32_t n = lengths[l];
            check_case(check, "%u numbers, %u rows", n, n_rows);
            float *a = check_input(check, "a", n * sizeof *a, sizeof *a);
            float *rows =
                check_input(check, "rows", (size_t)n * n_rows * sizeof *rows, sizeof *rows);
            float *sums = check_output(check, "sums", n_rows * sizeof *sums, sizeof *sums);
            check_floats(check, a, n, CHECK_NORMAL);
            check_floats(check, rows, n * n_rows, CHECK_NORMAL);
            for (uint32_t i = 0; i < n_rows; i++)
                want[i] = c->dot(a, rows + i * n, n);
            CHECK_CALL(check, kernels->dot_rows(a, rows, n, n_rows, sums));
            check_same(check, "sums", sums, want, n_rows, sizeof *sums);
        }
}

BENCH(dot_rows)
{
    check_case(check, "bench");
    float *a = check_input(check, "a", 384 * sizeof *a, 64),
          *rows = check_input(check, "rows", 128 * 384 * sizeof *rows, 64);
    float *sums = check_output(check, "sums", 128 * sizeof *sums, 64);
    CHECK_BENCH(check, kernels->dot_rows(a, rows, 384, 128, sums), "128 rows of 384");
}

BENCH(dot)
{
    static const uint32_t n[] = { 16, 128 };
    volatile float sum = 0;
    for (size_t i = 0; i < COUNT(n); i++) {
        check_case(check, "bench");
        float *a = check_input(check, "a", n[i] * sizeof *a, 64),
              *b = check_input(check, "b", n[i] * sizeof *b, 64);
        check_floats(check, a, n[i], CHECK_NORMAL);
        check_floats(check, b, n[i], CHECK_NORMAL);
        CHECK_BENCH(check, sum = kernels->dot(a, b, n[i]), "%u", n[i]);
    }
    (void)sum;
}

typedef struct combined {
    float *rows, *weights, *got;
    uint32_t k, n, n_y;
} combined;

static combined make_combined(checker *check, uint32_t k, uint32_t n, uint32_t n_y, check_fill fill)
{
    combined p = { .k = k, .n = n, .n_y = n_y };
    p.rows = check_input(check, "rows", (size_t)k * n * sizeof *p.rows, sizeof *p.rows);
    p.weights = check_input(check, "weights", n_y * k * sizeof *p.weights, sizeof *p.weights);
    p.got = check_output(check, "sums", n_y * n * sizeof *p.got, sizeof *p.got);
    check_floats(check, p.rows, (size_t)k * n, CHECK_NORMAL);
    check_floats(check, p.weights, n_y * k, fill);
    return p;
}

CHECK(combine_rows)
{
    static const uint32_t rows[] = { 1, 3, 64, 80 };
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (size_t r = 0; r < COUNT(rows); r++)
            for (int fill = 0; fill < CHECK_N_FILLS; fill++) {
                const uint32_t n_y = 1 + (uint32_t)(l + r) % 6;
                check_case(check, "%u times %u rows of %u numbers, %s", n_y, rows[r], lengths[l],
                           check_fill_name((check_fill)fill));
                combined p = make_combined(check, rows[r], lengths[l], n_y, (check_fill)fill);
                float want[6 * 512];
                c->combine_rows(p.rows, p.weights, p.k, p.n, n_y, want);
                CHECK_CALL(check, kernels->combine_rows(p.rows, p.weights, p.k, p.n, n_y, p.got));
                check_same(check, "sums", p.got, want, n_y * p.n, sizeof *want);
            }
}

BENCH(combine_rows)
{
    static const uint32_t sizes[] = { 64, 128, 256 };
    for (size_t i = 0; i < COUNT(sizes); i++) {
        for (uint32_t n_y = 1; n_y <= 4; n_y += 3) {
            check_case(check, "bench");
            combined p = make_combined(check, sizes[i], sizes[i], n_y, CHECK_NORMAL);
            CHECK_BENCH(check, kernels->combine_rows(p.rows, p.weights, p.k, p.n, p.n_y, p.got),
                        "%u x %u, %u times", sizes[i], sizes[i], n_y);
        }
    }
}

typedef struct outers {
    float *rows, *got;
    size_t stride, n_sums;
    uint32_t n_rows, n;
} outers;

static outers make_outers(checker *check, uint32_t n_rows, uint32_t n, check_fill fill)
{
    outers p = {
        .stride = (n + 15u) / 16 * 16, .n_sums = kvant_lower_floats(n), .n_rows = n_rows, .n = n
    };
    p.rows = check_input(check, "rows", n_rows * p.stride * sizeof *p.rows, sizeof *p.rows);
    p.got = check_output(check, "sums", p.n_sums * sizeof *p.got, sizeof *p.got);
    check_floats(check, p.rows, n_rows * p.stride, fill);
    check_floats(check, p.got, p.n_sums, CHECK_NORMAL);
    return p;
}

CHECK(add_outers)
{
    static const uint32_t dims[] = { 1, 2, 15, 16, 17, 31, 48, 64, 80, 128, 130 },
                          rows[] = { 1, 2, 7, 32 };
    for (size_t l = 0; l < COUNT(dims); l++)
        for (size_t r = 0; r < COUNT(rows); r++)
            for (int fill = 0; fill < CHECK_N_FILLS; fill++) {
                check_case(check, "%u rows of %u numbers, %s", rows[r], dims[l],
                           check_fill_name((check_fill)fill));
                outers p = make_outers(check, rows[r], dims[l], (check_fill)fill);
                static float want[144 * 130];
                memcpy(want, p.got, p.n_sums * sizeof *want);
                c->add_outers(p.rows, p.stride, p.n_rows, p.n, want);
                CHECK_CALL(check, kernels->add_outers(p.rows, p.stride, p.n_rows, p.n, p.got));
                check_same(check, "sums", p.got, want, p.n_sums, sizeof *want);
            }
}

BENCH(add_outers)
{
    static const uint32_t sizes[] = { 64, 128 };
    for (size_t i = 0; i < COUNT(sizes); i++) {
        check_case(check, "bench");
        outers p = make_outers(check, 32, sizes[i], CHECK_NORMAL);
        CHECK_BENCH(check, kernels->add_outers(p.rows, p.stride, p.n_rows, p.n, p.got),
                    "32 rows of %u", sizes[i]);
    }
}

typedef struct mean {
    double *a, *b, *room, *kept;
    uint32_t n;
} mean;

/* Sums of outer products of 2 n rows, or of n / 2 rows, which are not positive definite. */
static mean make_mean(checker *check, uint32_t n, bool definite)
{
    mean p = { .n = n };
    const size_t size = (size_t)n * n;
    p.a = check_output(check, "a", size * sizeof *p.a, sizeof *p.a);
    p.b = check_output(check, "b", size * sizeof *p.b, sizeof *p.b);
    p.room = check_output(check, "room", KVANT_MEAN_ROOM(n) * sizeof *p.room, sizeof *p.room);
    p.kept = check_input(check, "kept", 2 * size * sizeof *p.kept, sizeof *p.kept);
    memset(p.kept, 0, 2 * size * sizeof *p.kept);
    for (uint32_t row = 0; row < (definite ? 4 * n : n / 2); row++) {
        float x[128];
        check_floats(check, x, n, CHECK_NORMAL);
        for (size_t i = 0; i < size; i++)
            p.kept[row % 2 * size + i] += (double)x[i / n] * x[i % n];
    }
    return p;
}

static void fill_mean(const mean *p)
{
    const size_t size = (size_t)p->n * p->n;
    memcpy(p->a, p->kept, size * sizeof *p->a);
    memcpy(p->b, p->kept + size, size * sizeof *p->b);
}

CHECK(mean_factor)
{
    static const uint32_t dims[] = { 1, 2, 3, 8, 13, 64, 80, 128 };
    for (size_t i = 0; i < COUNT(dims); i++)
        for (int definite = 0; definite < 2; definite++) {
            check_case(check, "%u x %u, %s", dims[i], dims[i],
                       definite ? "positive definite" : "of few rows");
            mean p = make_mean(check, dims[i], definite);
            static double want[128 * 128], trace;
            double got = 0;
            fill_mean(&p);
            trace = c->mean_factor(p.n, p.a, p.b, p.room);
            for (size_t row = 0; row < p.n; row++)
                memcpy(want + row * p.n, p.b + row * p.n, p.n * sizeof *want);
            fill_mean(&p);
            CHECK_CALL(check, got = kernels->mean_factor(p.n, p.a, p.b, p.room));
            check_same(check, "trace", &got, &trace, 1, sizeof got);
            for (size_t row = 0; row < p.n && trace > 0; row++)
                check_same(check, "w", p.b + row * p.n + row, want + row * p.n + row, p.n - row,
                           sizeof *want);
        }
}

BENCH(mean_factor)
{
    static const uint32_t sizes[] = { 64, 128 };
    volatile double trace = 0;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        check_case(check, "bench");
        mean p = make_mean(check, sizes[i], true);
        CHECK_BENCH(check, (fill_mean(&p), trace = kernels->mean_factor(p.n, p.a, p.b, p.room)),
                    "%u x %u", sizes[i], sizes[i]);
    }
    (void)trace;
}

/* Random numbers below a diagonal of d, in place. */
static double *make_lower(checker *check, uint32_t n, double *kept)
{
    double *l = check_output(check, "l", (size_t)n * n * sizeof *l, sizeof *l);
    for (uint32_t i = 0; i < n; i++) {
        float x[128];
        check_floats(check, x, n, CHECK_NORMAL);
        for (uint32_t j = 0; j < n; j++)
            kept[i * n + j] = j < i ? (double)x[j] : j == i ? n : 0;
    }
    memcpy(l, kept, (size_t)n * n * sizeof *l);
    return l;
}

/* l times its inverse is the identity within the roundings of n products. Levels agree bit for
 * bit. */
CHECK(lower_inverse)
{
    static const uint32_t dims[] = { 1, 2, 5, 16, 40, 67, 128 };
    static double kept[128 * 128], want[128 * 128];
    for (size_t s = 0; s < COUNT(dims); s++) {
        const uint32_t n = dims[s];
        double column[128];
        check_case(check, "%u x %u", n, n);
        double *l = make_lower(check, n, kept),
               *room = check_output(check, "column", n * sizeof *room, sizeof *room);
        memcpy(want, kept, (size_t)n * n * sizeof *want);
        c->lower_inverse(n, want, column);
        CHECK_CALL(check, kernels->lower_inverse(n, l, room));
        check_same(check, "inverse", l, want, (size_t)n * n, sizeof *want);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < n; j++) {
                double product = 0;
                for (uint32_t k = 0; k < n; k++)
                    product += kept[i * n + k] * l[k * n + j];
                check_near(check, "product", (size_t)i * n + j, product, i == j, 1e-9);
            }
    }
}

BENCH(lower_inverse)
{
    static double kept[128 * 128];
    double column[128];
    check_case(check, "bench");
    double *l = make_lower(check, 128, kept);
    CHECK_BENCH(check, (memcpy(l, kept, sizeof kept), kernels->lower_inverse(128, l, column)),
                "128 x 128");
}

enum { MOST_VECTORS = 23 };

/* A triangle of n x n numbers and n_x vectors. */
typedef struct triangular {
    uint32_t n, n_x;
    uint16_t *triangle;
    float *x, before[MOST_VECTORS * 512];
} triangular;

/* The diagonal is 1 ... 2, and numbers below it are random and at most 1 / sqrt(n), so the inverse
 * is bounded. */
static void make_triangular(checker *check, uint32_t n, uint32_t n_x, triangular *t)
{
    const size_t size = kvant_triangle_size(n);
    float row[512];
    check_case(check, "%u x %u, %u vectors", n, n, n_x);
    t->n = n, t->n_x = n_x;
    t->triangle =
        check_input(check, "triangle", (size + KVANT_TRIANGLE_PADDING) * sizeof *t->triangle,
                    sizeof *t->triangle);
    t->x = check_output(check, "x", (size_t)n_x * n * sizeof *t->x, sizeof *t->x);
    for (uint32_t i = 0; i < n; i++) {
        check_floats(check, row, n, CHECK_NORMAL);
        for (uint32_t j = 0; j <= i; j++)
            row[j] = j == i ? 1 + fabsf(sinf(row[j])) : sinf(row[j]) / sqrtf((float)n);
        kvant_triangle_set_row(t->triangle, n, i, row);
    }
    for (uint32_t i = 0; i < KVANT_TRIANGLE_PADDING; i++)
        t->triangle[size + i] = 0x7e00; /* NaN */
    for (uint32_t i = 0; i < n_x; i++)
        check_floats(check, t->before + (size_t)i * n, n, CHECK_NORMAL);
    memcpy(t->x, t->before, (size_t)n_x * n * sizeof *t->x);
}

/* Reads a number without the kernel under test. */
static double triangle_at(const triangular *t, uint32_t i, uint32_t j)
{
    const uint8_t byte = kvant_triangle_codes(t->triangle, t->n, i)[j / 2];
    const int code = j % 2 ? byte >> 4 : byte & 15;
    const uint16_t half = t->triangle[j == i ? t->n + i : i];
    return j > i ? 0 : (j < i ? code - (code & 8) * 2 : 1) * (double)kvant_half_to_float(half);
}

typedef enum triangle_task { MULTIPLY_UPPER, SOLVE_UPPER, SOLVE_LOWER } triangle_task;

/* Puts the solution into the equations: |L^T x - b| <= (n + 3) 2^-23 |L^T| |x|, and the same for L.
 * (Higham, Accuracy and Stability, 8.1, with two roundings of a quotient.) */
static void check_solution(checker *check, const triangular *t, bool lower)
{
    for (uint32_t v = 0; v < t->n_x; v++)
        for (uint32_t i = 0; i < t->n; i++) {
            double sum = 0, magnitudes = 0;
            for (uint32_t j = 0; j < t->n; j++) {
                const double number = lower ? triangle_at(t, i, j) : triangle_at(t, j, i);
                const double term = number * (double)t->x[v * t->n + j];
                sum += term;
                magnitudes += fabs(term);
            }
            check_near(check, "equation", (size_t)v * t->n + i, sum,
                       (double)t->before[v * t->n + i], (t->n + 3) * 0x1p-23 * magnitudes);
        }
}

/* Makes -0 of the last vector. */
static void clear_last(triangular *t)
{
    const size_t first = (size_t)(t->n_x - 1) * t->n;
    for (uint32_t i = 0; i < t->n; i++)
        t->x[first + i] = t->before[first + i] = -0.0f;
}

/* Sums begin at 0, so no product is -0. */
static void check_product(checker *check, const triangular *t)
{
    for (uint32_t v = 0; v < t->n_x; v++)
        for (uint32_t i = 0; i < t->n; i++) {
            double sum = 0, magnitudes = 0;
            for (uint32_t j = i; j < t->n; j++) {
                const double term = triangle_at(t, j, i) * (double)t->before[v * t->n + j];
                sum += term;
                magnitudes += fabs(term);
            }
            check_near(check, "product", (size_t)v * t->n + i, (double)t->x[v * t->n + i], sum,
                       t->n * 0x1p-23 * magnitudes);
            if (magnitudes == 0 && signbit(t->x[v * t->n + i]))
                check_fail(check, "product %u of vector %u is -0", i, v);
        }
}

typedef KVANT_TRIANGLE_FN(triangle_fn);

static void check_triangles(checker *check, triangle_fn *kernel, triangle_fn *c, triangle_task task)
{
    static const uint32_t dims[] = { 1, 2, 15, 16, 17, 33, 64, 80, 96, 127, 128, 129, 511 };
    static triangular t;
    static const uint32_t counts[] = { 1, 3, 5, 16, MOST_VECTORS };
    static float want[MOST_VECTORS * 512];
    for (size_t s = 0; s < COUNT(dims) * COUNT(counts); s++) {
        const uint32_t n_x = counts[s % COUNT(counts)];
        make_triangular(check, dims[s / COUNT(counts)], n_x, &t);
        if (task == MULTIPLY_UPPER)
            clear_last(&t);
        CHECK_CALL(check, kernel(t.triangle, t.n, t.n_x, t.x));
        memcpy(want, t.before, sizeof want);
        c(t.triangle, t.n, t.n_x, want);
        check_same(check, "x", t.x, want, (size_t)t.n * n_x, sizeof *want);
        if (task == MULTIPLY_UPPER)
            check_product(check, &t);
        else
            check_solution(check, &t, task == SOLVE_LOWER);
    }
}

static void bench_triangles(checker *check, triangle_fn *kernel)
{
    static triangular t;
    for (uint32_t n_x = 1; n_x <= 16; n_x *= 4) {
        make_triangular(check, 128, n_x, &t);
        CHECK_BENCH(check, (memcpy(t.x, t.before, n_x * 512), kernel(t.triangle, 128, n_x, t.x)),
                    "128 x 128, %u vectors", n_x);
    }
}

CHECK(triangle_row)
{
    static const uint32_t dims[] = { 1, 2, 15, 16, 17, 33, 64, 127, 128, 511 };
    static triangular t;
    for (size_t s = 0; s < COUNT(dims); s++) {
        make_triangular(check, dims[s], 1, &t);
        float *row = check_output(check, "row", ((t.n + 15) / 16) * 16 * sizeof *row, sizeof *row);
        for (uint32_t i = 0; i < t.n; i++) {
            CHECK_CALL(check, kernels->triangle_row(t.triangle, t.n, i, row));
            for (uint32_t j = 0; j <= i; j++)
                check_near(check, "number", j, (double)row[j], triangle_at(&t, i, j), 0);
        }
    }
}
CHECK(solve_lower)
{
    check_triangles(check, kernels->solve_lower, c->solve_lower, SOLVE_LOWER);
}
CHECK(solve_upper)
{
    check_triangles(check, kernels->solve_upper, c->solve_upper, SOLVE_UPPER);
}
CHECK(multiply_upper)
{
    check_triangles(check, kernels->multiply_upper, c->multiply_upper, MULTIPLY_UPPER);
}

BENCH(triangle_row)
{
    static triangular t;
    make_triangular(check, 128, 1, &t);
    float *row = check_output(check, "row", 128 * sizeof *row, sizeof *row);
    CHECK_BENCH(check, kernels->triangle_row(t.triangle, 128, 127, row), "128 numbers");
}
BENCH(solve_lower)
{
    bench_triangles(check, kernels->solve_lower);
}
BENCH(solve_upper)
{
    bench_triangles(check, kernels->solve_upper);
}
BENCH(multiply_upper)
{
    bench_triangles(check, kernels->multiply_upper);
}

typedef struct coded {
    float *a, *values;
    uint8_t *codes;
    uint32_t n, bits;
} coded;

static coded make_coded(checker *check, uint32_t n, uint32_t bits, uint32_t kind)
{
    coded p = { .n = n, .bits = bits };
    uint32_t n_values = bits > 5 ? 1u << bits : 32;
    check_case(check, "%u numbers, %u bits, kind %u", n, bits, kind);
    p.a = check_input(check, "a", n * sizeof *p.a, sizeof *p.a);
    p.codes = check_input(check, "codes", n, 1);
    p.values = check_input(check, "values", n_values * sizeof *p.values, sizeof *p.values);
    check_floats(check, p.a, n, CHECK_NORMAL);
    check_floats(check, p.values, n_values, kind ? CHECK_AWKWARD : CHECK_NORMAL);
    for (uint32_t i = 0; i < n; i++)
        p.codes[i] = (uint8_t)(kind == 1 ? (1u << bits) - 1 : check_below(check, 1u << bits));
    return p;
}

CHECK(dot_codes)
{
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (uint32_t bits = 1; bits <= 8; bits++)
            for (uint32_t kind = 0; kind < 3; kind++) {
                coded p = make_coded(check, lengths[l], bits, kind);
                float got = 0, want = c->dot_codes(p.a, p.codes, p.n, p.values, bits);
                CHECK_CALL(check, got = kernels->dot_codes(p.a, p.codes, p.n, p.values, bits));
                check_same(check, "sum", &got, &want, 1, sizeof got);
            }
}

BENCH(dot_codes)
{
    static const uint32_t bits[] = { 2, 4, 8 };
    volatile float sum = 0;
    for (size_t i = 0; i < COUNT(bits); i++) {
        coded p = make_coded(check, 128, bits[i], 0);
        CHECK_BENCH(check, sum = kernels->dot_codes(p.a, p.codes, p.n, p.values, p.bits),
                    "128, %u bits", bits[i]);
    }
    (void)sum;
}

CHECK(hadamard)
{
    float want[512];
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (uint32_t block = 1; block <= lengths[l] && lengths[l] % block == 0; block *= 2)
            for (int fill = 0; fill < CHECK_N_FILLS; fill++) {
                uint32_t n = lengths[l];
                check_case(check, "%u numbers in blocks of %u, %s", n, block,
                           check_fill_name((check_fill)fill));
                float *x = check_output(check, "x", n * sizeof *x, sizeof *x);
                check_floats(check, x, n, (check_fill)fill);
                memcpy(want, x, n * sizeof *x);
                c->hadamard(want, n, block);
                CHECK_CALL(check, kernels->hadamard(x, n, block));
                check_same(check, "x", x, want, n, sizeof *x);
            }
}

BENCH(hadamard)
{
    static const uint32_t n[] = { 64, 128, 256 };
    for (size_t i = 0; i < COUNT(n); i++) {
        check_case(check, "bench");
        float *x = check_output(check, "x", n[i] * sizeof *x, 64);
        check_floats(check, x, n[i], CHECK_NORMAL);
        CHECK_BENCH(check, kernels->hadamard(x, n[i], n[i]), "%u", n[i]);
    }
}

CHECK(range)
{
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (int fill = 0; fill < CHECK_N_FILLS; fill++)
            for (uint32_t round = 0; round < 8; round++) {
                uint32_t n = lengths[l];
                check_case(check, "%u numbers, %s, round %u", n, check_fill_name((check_fill)fill),
                           round);
                float *x = check_input(check, "x", n * sizeof *x, sizeof *x), min, max;
                float *low = check_output(check, "min", sizeof *low, sizeof *low);
                float *high = check_output(check, "max", sizeof *high, sizeof *high);
                check_floats(check, x, n, (check_fill)fill);
                c->range(x, n, &min, &max);
                CHECK_CALL(check, kernels->range(x, n, low, high));
                check_near(check, "min", 0, *low, min, 0);
                check_near(check, "max", 0, *high, max, 0);
            }
}

BENCH(range)
{
    check_case(check, "bench");
    float *x = check_input(check, "x", 128 * sizeof *x, 64), min, max;
    check_floats(check, x, 128, CHECK_NORMAL);
    CHECK_BENCH(check, kernels->range(x, 128, &min, &max), "128");
}

/* kind: a fill, or a fill with an infinity or a NaN in it. */
CHECK(magnitude)
{
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (int fill = 0; fill < CHECK_N_FILLS; fill++)
            for (uint32_t at = 0; at < lengths[l] + 1; at += 1 + lengths[l] / 9) {
                uint32_t n = lengths[l], got = 0;
                check_case(check, "%u numbers, %s, not finite at %u", n,
                           check_fill_name((check_fill)fill), at);
                float *x = check_input(check, "x", n * sizeof *x, sizeof *x);
                check_floats(check, x, n, (check_fill)fill);
                if (at < n)
                    x[at] = at % 2 ? NAN : -INFINITY;
                uint32_t want = c->magnitude(x, n);
                CHECK_CALL(check, got = kernels->magnitude(x, n));
                check_same(check, "largest", &got, &want, 1, sizeof got);
            }
}

BENCH(magnitude)
{
    check_case(check, "bench");
    volatile uint32_t largest = 0;
    float *x = check_input(check, "x", 128 * sizeof *x, 64);
    check_floats(check, x, 128, CHECK_NORMAL);
    CHECK_BENCH(check, largest = kernels->magnitude(x, 128), "128");
    (void)largest;
}
