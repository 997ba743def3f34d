/* check_quantize.c - conversion of numbers to codes: the same bits at every level, for ties and for
 * numbers on thresholds, too. */
#include "check.h"

static const uint32_t lengths[] = { 1, 3, 7, 8, 9, 15, 16, 17, 31, 40, 64, 80, 128, 512 };

/* Steps as in the uniform codecs: codes of either sign, or from 0 on. */
static kvant_uniform_step make_step(checker *check, uint32_t bits, bool is_signed)
{
    float high = (float)((1u << (is_signed ? bits - 1 : bits)) - 1);
    kvant_uniform_step step = { .inverse = 3, .high = high };
    step.zero = is_signed ? 0 : check_normal(check);
    step.low = is_signed ? -high : 0;
    step.offset = is_signed ? -(float)(1u << (bits - 1)) : 0;
    return step;
}

CHECK(uniform_codes)
{
    uint8_t want[512];
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (uint32_t bits = 1; bits <= 8; bits++)
            for (uint32_t kind = 0; kind < 2 * CHECK_N_FILLS + 2; kind++) {
                uint32_t n = lengths[l], fill = kind / 2;
                check_case(check, "%u numbers, %u bits, kind %u", n, bits, kind);
                float *x = check_input(check, "x", n * sizeof *x, sizeof *x);
                kvant_uniform_step *step = check_input(check, "step", sizeof *step, 4);
                uint8_t *codes = check_output(check, "codes", n, 1);
                *step = make_step(check, bits, kind % 2 == 1);
                check_floats(check, x, n, fill < CHECK_N_FILLS ? (check_fill)fill : CHECK_NORMAL);
                for (uint32_t i = 0; fill == CHECK_N_FILLS && i < n; i++) { /* ties */
                    step->zero = 0;
                    step->inverse = 1;
                    x[i] = (float)check_below(check, 2u << bits) / 2 -
                           (kind % 2 ? (float)(1u << bits) / 2 : 0);
                }
                c->uniform_codes(x, n, step, want);
                CHECK_CALL(check, kernels->uniform_codes(x, n, step, codes));
                check_same(check, "codes", codes, want, n, 1);
            }
}

BENCH(uniform_codes)
{
    check_case(check, "bench");
    float *x = check_input(check, "x", 128 * sizeof *x, 64);
    uint8_t *codes = check_output(check, "codes", 128, 64);
    kvant_uniform_step step = make_step(check, 4, false);
    check_floats(check, x, 128, CHECK_NORMAL);
    CHECK_BENCH(check, kernels->uniform_codes(x, 128, &step, codes), "128, 4 bits");
}

typedef struct book {
    float *x, *thresholds;
    uint8_t *codes;
} book;

static book make_book(checker *check, uint32_t n, uint32_t bits, uint32_t kind)
{
    book b;
    uint32_t used = (1u << bits) - 1, readable = bits > 5 ? 1u << bits : 32;
    check_case(check, "%u numbers, %u bits, kind %u", n, bits, kind);
    b.x = check_input(check, "x", n * sizeof *b.x, sizeof *b.x);
    b.thresholds =
        check_input(check, "thresholds", readable * sizeof *b.thresholds, sizeof *b.thresholds);
    b.codes = check_output(check, "codes", n, 1);
    for (uint32_t i = 0; i < readable; i++) /* numbers after the thresholds may be anything */
        b.thresholds[i] = i < used ? ((float)i - (float)used / 2) * 4 / (float)(1u << bits) : NAN;
    check_floats(check, b.x, n, kind < CHECK_N_FILLS ? (check_fill)kind : CHECK_NORMAL);
    /* a number on a threshold is not above it */
    for (uint32_t i = 0; kind == CHECK_N_FILLS && i < n; i++)
        b.x[i] = b.thresholds[check_below(check, used)];
    return b;
}

CHECK(codebook_codes)
{
    uint8_t want[512];
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (uint32_t bits = 1; bits <= 8; bits++)
            for (uint32_t kind = 0; kind <= CHECK_N_FILLS; kind++) {
                uint32_t n = lengths[l];
                float inverse = kind == CHECK_N_FILLS ? 1 : 1.25f;
                book b = make_book(check, n, bits, kind);
                c->codebook_codes(b.x, n, inverse, b.thresholds, bits, want);
                CHECK_CALL(check,
                           kernels->codebook_codes(b.x, n, inverse, b.thresholds, bits, b.codes));
                check_same(check, "codes", b.codes, want, n, 1);
            }
}

BENCH(codebook_codes)
{
    static const uint32_t bits[] = { 2, 4, 8 };
    for (size_t i = 0; i < COUNT(bits); i++) {
        book b = make_book(check, 128, bits[i], CHECK_NORMAL);
        CHECK_BENCH(check, kernels->codebook_codes(b.x, 128, 1.25f, b.thresholds, bits[i], b.codes),
                    "128, %u bits", bits[i]);
    }
}

static kvant_feedback *make_feedback(checker *check, uint32_t n)
{
    const uint32_t stride = (n + 15) / 16 * 16;
    const size_t bytes = sizeof(kvant_feedback) + (size_t)n * stride * sizeof(float);
    kvant_feedback *f = check_input(check, "feedback", bytes, 4);
    memset(f, 0, bytes);
    f->n = n;
    f->stride = stride;
    for (uint32_t j = 0; j < n; j++) {
        f->pivots[j] = check_uniform(check) * 2 + 0.01f;
        for (uint32_t i = j + 1; i < n; i++)
            f->columns[(size_t)j * stride + i] = check_normal(check) / 4;
    }
    return f;
}

CHECK(feedback_codes)
{
    uint8_t want[512];
    kvant_feedback_sums sums;
    for (size_t l = 0; l < COUNT(lengths); l++)
        for (uint32_t bits = 1; bits <= 8; bits++)
            for (uint32_t kind = 0; kind <= CHECK_N_FILLS; kind++) {
                /* more would not fit a checker's buffers */
                uint32_t n = lengths[l] < 200 ? lengths[l] : 200;
                book b = make_book(check, n, bits, kind);
                const kvant_feedback *f = make_feedback(check, n);
                float *values =
                    check_input(check, "values", (sizeof *values) << bits, sizeof *values);
                kvant_feedback_sums *got = check_output(check, "sums", sizeof *got, 4);
                for (uint32_t i = 0; i < 1u << bits; i++)
                    values[i] =
                        ((float)i - (float)((1u << bits) - 1) / 2) * 4 / (float)(1u << bits);
                c->feedback_codes(f, b.x, b.thresholds, values, bits, want, &sums);
                CHECK_CALL(check, kernels->feedback_codes(f, b.x, b.thresholds, values, bits,
                                                          b.codes, got));
                check_same(check, "codes", b.codes, want, n, 1);
                check_same(check, "sums", got, &sums, 2, sizeof(float));
            }
}

BENCH(feedback_codes)
{
    static const uint32_t dims[] = { 64, 128 };
    static const float values[16] = { 0 };
    for (size_t i = 0; i < COUNT(dims); i++) {
        book b = make_book(check, dims[i], 4, CHECK_NORMAL);
        const kvant_feedback *f = make_feedback(check, dims[i]);
        kvant_feedback_sums sums;
        CHECK_BENCH(check, kernels->feedback_codes(f, b.x, b.thresholds, values, 4, b.codes, &sums),
                    "%u, 4 bits", dims[i]);
    }
}
