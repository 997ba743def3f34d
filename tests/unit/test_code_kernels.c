/* test_code_kernels.c - attention on codes: the kernels of every CPU level against portable C, and portable C against
 * codes read one by one. */
#include "testing.h"

#include "../../src/base/half.h"
#include "../../src/kernels/kernels.h"

static const kvant_cpu_level levels[] = { KVANT_CPU_C, KVANT_CPU_AVX2, KVANT_CPU_AVX512, KVANT_CPU_AVX512_VNNI };

static const kvant_kernels *level(size_t i)
{
    const kvant_kernels *kernels = kvant_kernels_get(levels[i]);
    if (!kernels)
        print_message("not run: level %s is not on this machine\n", kvant_cpu_level_name(levels[i]));
    return kernels;
}

typedef struct problem {
    kvant_layout layout;
    uint32_t columns, stride, dots_stride, n;
    int16_t values[16];
    uint32_t *page;
    int16_t *x;
    int32_t *want, *got;
} problem;

/* extreme: all codes and integers the largest that kernels.h allows; signs: alternately. */
static problem make_problem(kvant_role role, uint32_t dim, uint32_t bits, uint32_t n, bool extreme, uint64_t *rng)
{
    problem p = { .n = n };
    kvant_layout_init(&p.layout, role, dim, bits);
    p.columns = 16 * p.layout.column_tiles;
    p.stride = (p.columns + 63) / 64 * 64;
    p.dots_stride = 16 * p.layout.row_tiles;
    p.page = aligned(p.layout.code_bytes);
    p.x = aligned(n * p.stride * sizeof *p.x);
    p.want = aligned(n * p.dots_stride * sizeof *p.want);
    p.got = aligned(n * p.dots_stride * sizeof *p.got);
    int32_t largest = extreme ? 4095 : 1 + (int32_t)(test_random(rng) % 4095);
    int32_t limit = INT32_MAX / (largest * (int32_t)p.columns);
    limit = limit < KVANT_CODE_OPERAND_MAX ? limit : KVANT_CODE_OPERAND_MAX;
    for (size_t i = 0; i < p.layout.code_bytes / 4; i++)
        p.page[i] = extreme ? UINT32_MAX : (uint32_t)(test_random(rng) >> 32);
    for (uint32_t c = 0; c < 1u << bits; c++)
        p.values[c] = (int16_t)(extreme ? largest : (int32_t)(test_random(rng) % (2u * largest + 1)) - largest);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t c = 0; c < p.columns; c++) {
            int32_t number = (int32_t)((test_random(rng) >> 20) % (2u * limit + 1)) - limit;
            if (extreme)
                number = i % 2 ? -limit : limit;
            p.x[i * p.stride + c / 64 * 64 + kvant_token_position(c % 64)] = (int16_t)number;
        }
    return p;
}

static void free_problem(problem *p)
{
    free(p->page);
    free(p->x);
    free(p->want);
    free(p->got);
}

/* From codes as the layout's own reader gives them. */
static void expect(problem *p)
{
    uint8_t codes[KVANT_MAX_PADDED_DIM];
    for (uint32_t t = 0; t < 64; t++) {
        kvant_layout_get(&p->layout, p->page, t, codes);
        for (uint32_t j = 0; j < p->layout.padded_dim; j++) {
            bool key = p->layout.role == KVANT_ROLE_K;
            uint32_t row = kvant_layout_row_position(&p->layout, key ? t : j), column = key ? j : t;
            for (uint32_t i = 0; i < p->n; i++)
                p->want[i * p->dots_stride + row] +=
                    p->values[codes[j]] *
                    p->x[i * p->stride + column / 64 * 64 + kvant_token_position(column % 64)];
        }
    }
}

static void check_dots(kvant_role role, uint32_t dim, uint32_t bits, uint32_t n, bool extreme, uint64_t *rng)
{
    problem p = make_problem(role, dim, bits, n, extreme, rng);
    size_t bytes = n * p.dots_stride * sizeof *p.got;
    expect(&p);
    for (size_t l = 0; l < COUNT(levels); l++) {
        const kvant_kernels *kernels = kvant_kernels_get(levels[l]);
        if (!kernels)
            continue;
        kvant_code_dots_fn *const functions[] = { kernels->code_dots, kernels->tile_dots };
        for (size_t f = 0; f < COUNT(functions); f++) {
            memset(p.got, 0x55, bytes);
            functions[f](&p.layout, p.page, p.values, p.x, p.stride, p.got, p.dots_stride, n);
            for (size_t i = 0; i < n * p.dots_stride; i++)
                if (p.got[i] != p.want[i])
                    fail_msg("%s %s role %d dim %u bits %u n %u: dot %zu is %d, not %d",
                             f ? "tile_dots" : "code_dots", kvant_cpu_level_name(levels[l]), (int)role, dim, bits,
                             n, i, p.got[i], p.want[i]);
        }
    }
    free_problem(&p);
}

static void products_of_codes_are_exact(void **state)
{
    static const uint32_t key_dims[] = { 16, 40, 64, 80, 128, 256, 512 }, value_dims[] = { 64, 128, 192, 512 };
    (void)state;
    uint64_t rng = 31;
    for (size_t l = 0; l < COUNT(levels); l++)
        level(l);
    for (uint32_t bits = 1; bits <= 4; bits++)
        for (uint32_t n = 1; n <= 14; n++)
            for (int extreme = 0; extreme < 2; extreme++) {
                for (size_t i = 0; i < COUNT(key_dims); i++)
                    check_dots(KVANT_ROLE_K, key_dims[i], bits, n, extreme, &rng);
                for (size_t i = 0; i < COUNT(value_dims); i++)
                    check_dots(KVANT_ROLE_V, value_dims[i], bits, n, extreme, &rng);
            }
}

/* Weights of many sizes, ties between integers, zeros, and what fixed_point.h says of tiny and infinite numbers. */
static void fill_weights(float *w, float *scale, uint32_t kind, uint64_t *rng)
{
    for (uint32_t i = 0; i < 64; i++) {
        w[i] = (float)exp(-20 * test_uniform(rng));
        scale[i] = kvant_half_to_float(kvant_half_from_float(0.1f + (float)test_uniform(rng)));
        if (kind == 1)
            w[i] = (float)(i / 2) + 0.5f, scale[i] = i == 63 ? 8191 / w[i] : 1; /* step 1: halves */
        else if (kind == 2)
            w[i] = 0;
        else if (kind == 3)
            w[i] *= 1e-36f;
        else if (kind == 4)
            w[i] *= i % 3 ? 1 : -1e-4f;
        else if (kind == 5 && i == 40)
            w[i] = NAN;
        else if (kind == 6 && i == 9)
            w[i] = -INFINITY;
        else if (kind == 7)
            w[i] *= 1e34f;
    }
}

static void fixed_point_is_the_same_and_near(void **state)
{
    static const int32_t limits[] = { 8191, 32767, 1023, 1 };
    _Alignas(64) float w[64], scale[64];
    _Alignas(64) int16_t want[64], got[64];
    (void)state;
    uint64_t rng = 32;
    for (uint32_t round = 0; round < 400; round++) {
        int32_t limit = limits[round / 8 % COUNT(limits)];
        fill_weights(w, scale, round % 8, &rng);
        kvant_fixed_point c = kvant_fixed_point_c(w, scale, limit, want), x;
        int32_t sum = 0;
        float largest = 0;
        for (uint32_t i = 0; i < 64; i++) {
            sum += want[i];
            largest = fmaxf(largest, fabsf(w[i] * scale[i]));
        }
        assert_int_equal(sum, c.sum);
        if (round % 8 == 5 || round % 8 == 6)
            assert_true(isnan(c.step) && c.sum == 0);
        else if (largest < ldexpf(1, -110))
            assert_true(c.step == 0 && c.sum == 0);
        for (uint32_t i = 0; i < 64 && c.step > 0; i++)
            assert_true(abs(want[i]) <= limit && fabs((double)c.step * want[i] - (double)w[i] * scale[i]) <=
                                                     (0.5 + limit * pow(2, -22)) * c.step);
        for (size_t l = 0; l < COUNT(levels); l++) {
            if (!kvant_kernels_get(levels[l]))
                continue;
            memset(got, 0x55, sizeof got);
            x = kvant_kernels_get(levels[l])->fixed_point(w, scale, limit, got);
            assert_memory_equal(got, want, sizeof got);
            assert_int_equal(x.sum, c.sum);
            assert_true(x.step == c.step || (isnan(x.step) && isnan(c.step)));
        }
    }
}

static void dots_become_numbers_within_their_bounds(void **state)
{
    enum { N = 192 };
    _Alignas(64) int32_t dots[N];
    _Alignas(64) float scale[64], zero[64], scores[64], sums[N], before[N];
    (void)state;
    uint64_t rng = 33;
    double ulp = pow(2, -24);
    for (uint32_t round = 0; round < 200; round++) {
        for (uint32_t i = 0; i < N; i++)
            dots[i] = (int32_t)(uint32_t)(test_random(&rng) >> (32 + round % 30));
        fill_normal(scale, 64, &rng);
        fill_normal(zero, 64, &rng);
        fill_normal(before, N, &rng);
        kvant_fixed_point x = { (float)exp(-10 * test_uniform(&rng)), (int32_t)(test_random(&rng) >> 44) };
        for (size_t l = 0; l < COUNT(levels); l++) {
            const kvant_kernels *kernels = kvant_kernels_get(levels[l]);
            if (!kernels)
                continue;
            for (int zeros = 0; zeros < 2; zeros++) {
                kernels->scale_dots(dots, x, scale, zeros ? zero : NULL, scores);
                for (uint32_t i = 0; i < 64; i++) {
                    double first = (double)dots[i] * x.step * scale[i],
                           second = zeros * (double)x.step * x.sum * zero[i];
                    assert_true(fabs(scores[i] - (first + second)) <=
                                (4 * fabs(first) + 3 * fabs(second)) * ulp * 1.0001);
                }
            }
            for (uint32_t n = 16; n <= N; n += 16) {
                memcpy(sums, before, sizeof sums);
                kernels->add_dots(dots, x.step, zero[0], n, sums);
                for (uint32_t i = 0; i < N; i++) {
                    double part = (double)dots[i] * x.step;
                    if (i >= n)
                        assert_true(sums[i] == before[i]);
                    else
                        assert_true(fabs(sums[i] - (before[i] + part + zero[0])) <=
                                    4.0001 * ulp * (fabs(before[i]) + fabs(part) + fabs(zero[0])));
                }
            }
        }
    }
}

static void halves_of_tokens_take_their_positions(void **state)
{
    _Alignas(64) uint16_t half[64];
    _Alignas(64) float x[64];
    (void)state;
    uint64_t rng = 34;
    for (uint32_t round = 0; round < 50; round++) {
        for (uint32_t t = 0; t < 64; t++)
            half[t] = (uint16_t)(test_random(&rng) >> 48) & 0xfbff; /* neither infinite nor NaN */
        for (size_t l = 0; l < COUNT(levels); l++) {
            if (!kvant_kernels_get(levels[l]))
                continue;
            kvant_kernels_get(levels[l])->token_halves(half, x);
            for (uint32_t t = 0; t < 64; t++)
                assert_true(x[kvant_token_position(t)] == kvant_half_to_float(half[t]));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_of_codes_are_exact),
        cmocka_unit_test(fixed_point_is_the_same_and_near),
        cmocka_unit_test(dots_become_numbers_within_their_bounds),
        cmocka_unit_test(halves_of_tokens_take_their_positions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
