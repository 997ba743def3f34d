/* check_halves.c - conversion to fp16 and back: all 65536 halves, and every tie between two of them
 * with its neighbours. */
#include "check.h"

static const uint32_t lengths[] = { 1, 2, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 40, 64, 100, 512 };

/* Each level may choose the bits of a NaN, because no page holds one. */
static bool same_float(float a, float b)
{
    return (isnan(a) && isnan(b)) || kvant_float_bits(a) == kvant_float_bits(b);
}

CHECK(half_to_float)
{
    for (size_t l = 0; l < COUNT(lengths); l++) {
        uint32_t n = lengths[l], all = n == 512 ? 65536 : 512;
        for (uint32_t first = 0; first < all; first += n) {
            check_case(check, "%u numbers from %#x", n, first);
            uint16_t *half = check_input(check, "half", n * sizeof *half, sizeof *half);
            float *x = check_output(check, "x", n * sizeof *x, sizeof *x);
            for (uint32_t i = 0; i < n; i++)
                half[i] = (uint16_t)((first + i) * (n == 512 ? 1 : 127));
            CHECK_CALL(check, kernels->half_to_float(half, x, n));
            for (uint32_t i = 0; i < n; i++)
                if (!same_float(x[i], kvant_half_to_float(half[i])))
                    check_fail(check, "half %#x is %.9g, not %.9g", half[i], (double)x[i],
                               (double)kvant_half_to_float(half[i]));
        }
    }
}

BENCH(half_to_float)
{
    static const uint32_t n[] = { 16, 64, 512 };
    for (size_t i = 0; i < COUNT(n); i++) {
        check_case(check, "bench");
        uint16_t *half = check_input(check, "half", n[i] * sizeof *half, 64);
        float *x = check_output(check, "x", n[i] * sizeof *x, 64);
        memset(half, 0x3c, n[i] * sizeof *half);
        CHECK_BENCH(check, kernels->half_to_float(half, x, n[i]), "%u", n[i]);
    }
}

/* Three numbers for each half h: halfway to h + 1, and one step of binary32 on either side. 65504
 * and 65520 lie around the last half. */
static float near_tie(uint32_t i)
{
    uint16_t h = (uint16_t)(i / 3);
    if ((h & 0x7c00) == 0x7c00) /* neither infinite nor NaN */
        h &= 0xbfff;
    float low = kvant_half_to_float(h), high = kvant_half_to_float((uint16_t)(h + 1));
    float tie = isinf(high) ? copysignf(65520, low) : (low + high) / 2; /* exact */
    return i % 3 == 0 ? tie : nextafterf(tie, i % 3 == 1 ? INFINITY : -INFINITY);
}

static void check_to_half(checker *check, const kvant_kernels *kernels, uint32_t n, uint32_t first,
                          uint32_t kind)
{
    check_case(check, "%u numbers, kind %u from %#x", n, kind, first);
    float *x = check_input(check, "x", n * sizeof *x, sizeof *x);
    uint16_t *half = check_output(check, "half", n * sizeof *half, sizeof *half), want[512];
    if (kind == CHECK_N_FILLS)
        for (uint32_t i = 0; i < n; i++)
            x[i] = near_tie(first + i);
    else
        check_floats(check, x, n, (check_fill)kind);
    for (uint32_t i = 0; i < n; i++)
        want[i] = kvant_half_from_float(x[i]);
    CHECK_CALL(check, kernels->float_to_half(x, half, n));
    check_same(check, "half", half, want, n, sizeof *half);
}

CHECK(float_to_half)
{
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (uint32_t kind = 0; kind < CHECK_N_FILLS; kind++)
            check_to_half(check, kernels, lengths[l], 0, kind);
    for (uint32_t first = 0; first < 3 * 65536; first += 512) /* three numbers around each tie */
        check_to_half(check, kernels, 512, first, CHECK_N_FILLS);
}

BENCH(float_to_half)
{
    static const uint32_t n[] = { 16, 64, 512 };
    for (size_t i = 0; i < COUNT(n); i++) {
        check_case(check, "bench");
        float *x = check_input(check, "x", n[i] * sizeof *x, 64);
        uint16_t *half = check_output(check, "half", n[i] * sizeof *half, 64);
        check_floats(check, x, n[i], CHECK_NORMAL);
        CHECK_BENCH(check, kernels->float_to_half(x, half, n[i]), "%u", n[i]);
    }
}

CHECK(token_halves)
{
    for (uint32_t first = 0; first < 65536; first += KVANT_PAGE_TOKENS) {
        check_case(check, "halves from %#x", first);
        uint16_t *half = check_input(check, "half", KVANT_PAGE_TOKENS * sizeof *half, 16);
        float *x = check_output(check, "x", KVANT_PAGE_TOKENS * sizeof *x, 64);
        for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
            half[t] = (uint16_t)(first + t);
        CHECK_CALL(check, kernels->token_halves(half, x));
        for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
            if (!same_float(x[kvant_token_position(t)], kvant_half_to_float(half[t])))
                check_fail(check, "half %#x of token %u is %.9g", half[t], t,
                           (double)x[kvant_token_position(t)]);
    }
}

BENCH(token_halves)
{
    check_case(check, "bench");
    uint16_t *half = check_input(check, "half", KVANT_PAGE_TOKENS * sizeof *half, 64);
    float *x = check_output(check, "x", KVANT_PAGE_TOKENS * sizeof *x, 64);
    memset(half, 0x3c, KVANT_PAGE_TOKENS * sizeof *half);
    CHECK_BENCH(check, kernels->token_halves(half, x), "64");
}

CHECK(key_halves)
{
    static const uint32_t dims[] = { 8, 16, 20, 40, 64, 80, 100, 128, 256 };
    for (size_t i = 0; i < COUNT(dims); i++)
        for (uint32_t first = 0; first < 65536; first += KVANT_PAGE_TOKENS * dims[i]) {
            uint32_t dim = dims[i];
            check_case(check, "head_dim %u, halves from %#x", dim, first);
            uint16_t *half =
                check_input(check, "half", (size_t)KVANT_PAGE_TOKENS * dim * sizeof *half, 2);
            float *tile =
                check_output(check, "tile", (size_t)KVANT_PAGE_TOKENS * dim * sizeof *tile, 64);
            for (uint32_t k = 0; k < KVANT_PAGE_TOKENS * dim; k++)
                half[k] = (uint16_t)(first + k);
            CHECK_CALL(check, kernels->key_halves(half, dim, tile));
            for (uint32_t k = 0; k < KVANT_PAGE_TOKENS * dim; k++) {
                float got = tile[k % dim * KVANT_PAGE_TOKENS + kvant_token_position(k / dim)];
                if (!same_float(got, kvant_half_to_float(half[k])))
                    check_fail(check, "half %#x of token %u is %.9g", half[k], k / dim,
                               (double)got);
            }
        }
}

BENCH(key_halves)
{
    static const uint32_t dims[] = { 64, 128 };
    for (size_t i = 0; i < COUNT(dims); i++) {
        check_case(check, "bench");
        uint16_t *half =
            check_input(check, "half", (size_t)KVANT_PAGE_TOKENS * dims[i] * sizeof *half, 64);
        float *tile =
            check_output(check, "tile", (size_t)KVANT_PAGE_TOKENS * dims[i] * sizeof *tile, 64);
        memset(half, 0x3c, (size_t)KVANT_PAGE_TOKENS * dims[i] * sizeof *half);
        CHECK_BENCH(check, kernels->key_halves(half, dims[i], tile), "head_dim %u", dims[i]);
    }
}
