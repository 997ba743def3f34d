/* test_robust.c - first rows that must not spoil later rows: outliers, a monotonous first request,
 * refused rows. */
#include "tensor_fixture.h"

static const char *const specs[] = { "turboquant-4:center=first,norm=first",
                                     "trellis-4:center=first,norm=first",
                                     "int-4:axis=channel,center=first,norm=first",
                                     "turboquant-4:center=first,norm=first,recent=64" };

/* A key as models have it: RoPE rotates pairs of channels by the position, sizes are unequal, and
 * pairs that rotate slowly have large means. */
static void ordinary_row(uint32_t position, float *row, uint64_t *rng)
{
    for (uint32_t j = 0; j < WIDTH; j += 2) {
        double angle = position * pow(10000, -(double)(j % HEAD_DIM) / HEAD_DIM);
        double mean = j % HEAD_DIM >= 28 ? 6 : 0.3, size = j % 10 == 0 ? 3 : 0.7;
        double a = mean + test_normal(rng) * size, b = -mean / 2 + test_normal(rng) * size;
        row[j] = (float)(a * cos(angle) - b * sin(angle));
        row[j + 1] = (float)(a * sin(angle) + b * cos(angle));
    }
}

static void ordinary_rows(float *rows, uint32_t first, uint32_t n, uint64_t *rng)
{
    for (uint32_t i = 0; i < n; i++)
        ordinary_row(first + i, rows + (size_t)i * WIDTH, rng);
}

/* One token repeated: one vector, rotated by RoPE to each position. */
static void monotonous_rows(float *rows, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t rng = seed;
        ordinary_row(i, rows + (size_t)i * WIDTH, &rng);
    }
}

enum { FIRST = 200, LATER = 320, BLOCKS = 10 };

/* Error of LATER ordinary rows that follow a first batch, in batches of their own. */
static double later_error(const char *spec, const float *first, uint32_t n, uint32_t first_batch,
                          uint32_t batch, uint32_t *n_transforms)
{
    uint64_t rng = 52;
    static float rows[LATER * WIDTH];
    fixture f = make(spec, 1, BLOCKS, 0);
    ordinary_rows(rows, n, LATER, &rng);
    write_rows(&f, 0, n, first, first_batch, 2);
    write_rows(&f, n, LATER, rows, batch, 2);
    *n_transforms = tensor_info_of(&f).n_transforms;
    double error = error_of(&f, (n + 63) / 64 * 64, LATER - 64); /* whole blocks of later rows */
    drop(&f);
    return error;
}

/* One number of 1000, or of 1e5 (which fp16 cannot hold), among the first rows. */
CASE(one_large_number)
{
    static const float sizes[] = { 1000, -1000, 1e5f };
    for (size_t s = 0; s < COUNT(specs); s++)
        for (size_t i = 0; i < COUNT(sizes); i++)
            for (uint32_t batch = 1; batch <= LATER; batch += LATER - 1) {
                uint64_t rng = 51;
                float first[FIRST * WIDTH];
                uint32_t transforms;
                /* Single rows are pending as fp16. */
                uint32_t first_batch = batch == 1 && fabsf(sizes[i]) < 65504 ? 1 : FIRST;
                ordinary_rows(first, 0, FIRST, &rng);
                double ordinary =
                    later_error(specs[s], first, FIRST, first_batch, batch, &transforms);
                first[40 * WIDTH + 5] = sizes[i];
                double error = later_error(specs[s], first, FIRST, first_batch, batch, &transforms);
                if (!(error <= 1.3 * ordinary))
                    fail_msg("%s, a number of %g, batches of %u: error %g, without it %g", specs[s],
                             sizes[i], batch, error, ordinary);
            }
}

/* A monotonous first request, or one of zeros. */
CASE(monotonous_first_batch)
{
    for (size_t s = 0; s < COUNT(specs); s++)
        for (int zeros = 0; zeros < 2; zeros++)
            for (uint32_t batch = 1; batch <= LATER; batch += LATER - 1) {
                uint64_t rng = 53;
                static float ordinary[FIRST * WIDTH], same[FIRST * WIDTH];
                uint32_t transforms;
                ordinary_rows(ordinary, 0, FIRST, &rng);
                memset(same, 0, sizeof same);
                if (!zeros)
                    monotonous_rows(same, FIRST, 99);
                double want = later_error(specs[s], ordinary, FIRST, FIRST, batch, &transforms);
                uint32_t more;
                double error = later_error(specs[s], same, FIRST, FIRST, batch, &more);
                assert_int_equal(transforms, 2);
                /* the initial transform, the first request's, and one for ordinary rows */
                assert_int_equal(more, 3);
                /* Single rows are stored with the first request's transform until the tensor has
                 * seen 64 of them. */
                if (!(error <= 1.3 * want))
                    fail_msg("%s, %s first, batches of %u: error %g, after ordinary rows %g",
                             specs[s], zeros ? "zeros" : "one token", batch, error, want);
            }
}

/* Refused rows leave everything as in a tensor that never saw them: before a transform exists,
 * while rows are pending for one, and after. */
CASE(refused_rows_leave_no_trace)
{
    static const struct {
        float number;
        kvant_status status;
    } bad[] = { { 3e38f, KVANT_ERR_RANGE },
                { NAN, KVANT_ERR_NONFINITE },
                { -INFINITY, KVANT_ERR_NONFINITE } };
    static const uint32_t stages[] = {
        0, 10, 40, 30, 100, 7, 64, 50
    }; /* rows written before each attempt */
    for (size_t s = 0; s < COUNT(specs); s++)
        for (size_t b = 0; b < COUNT(bad); b++) {
            uint64_t rng = 54;
            fixture f = make(specs[s], 1, BLOCKS, 0), g = make_like(&f);
            static float rows[BLOCKS * 64 * WIDTH], wrong[100 * WIDTH];
            ordinary_rows(rows, 0, BLOCKS * 64, &rng);
            uint32_t n = 0;
            for (size_t stage = 0; stage < COUNT(stages); n += stages[stage++]) {
                for (uint32_t batch = 1; batch <= 100;
                     batch += 33) { /* batches of 1, 34, 67, 100 rows */
                    ordinary_rows(wrong, 1000, batch, &rng);
                    wrong[(size_t)(batch - 1) * WIDTH + WIDTH - 1] = bad[b].number;
                    assert_int_equal(try_write(&f, n < 20 ? 0 : n - 20, batch, wrong, 2),
                                     bad[b].status);
                }
                assert_memory_equal(f.memory, g.memory, f.bytes);
                assert_alike(&f, &g);
                uint32_t batch = stages[stage] == 100 ? 100 : 1;
                write_rows(&f, n, stages[stage], rows + (size_t)n * WIDTH, batch, 1);
                write_rows(&g, n, stages[stage], rows + (size_t)n * WIDTH, batch, 1);
                assert_memory_equal(f.memory, g.memory, f.bytes);
                assert_alike(&f, &g);
            }
            assert_int_equal(tensor_info_of(&f).n_transforms, 2);
            drop(&g);
            drop(&f);
        }
}

RUN_CASES(NULL, NULL)
