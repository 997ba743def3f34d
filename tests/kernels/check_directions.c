/* check_directions.c - the encoders' searches for the nearest direction: triplets of channels
 * (OCTOPUS), chunks of four (HQMQ and its baselines). Choices and bits are the same at every
 * level. */
#include "check.h"

/* Increasing levels between -1 and 1, or from 0 on, and thresholds between them. The last
 * thresholds are above every number. */
static void fill_levels(checker *check, uint32_t bits, bool norms, uint32_t room, float *levels,
                        float *thresholds)
{
    uint32_t n = 1u << bits;
    for (uint32_t k = 0; k < n; k++)
        levels[k] = ((float)k + 0.8f * check_uniform(check)) * (norms ? 3.0f : 2.0f) / (float)n -
                    (norms ? 0 : 1);
    for (uint32_t k = 0; k < room; k++)
        thresholds[k] = k + 1 < n ? (levels[k] + levels[k + 1]) / 2 : INFINITY;
}

typedef struct search {
    kvant_triplet_book *book;
    kvant_triplets *triplets;
} search;

static search make_search(checker *check, uint32_t n, uint32_t direction_bits, uint32_t norm_bits,
                          uint32_t rounding, check_fill fill)
{
    search s;
    check_case(check, "%u triplets, %u + %u bits, rounding %u, %s", n, direction_bits, norm_bits,
               rounding, check_fill_name(fill));
    s.book = check_input(check, "book", sizeof *s.book, 4);
    s.triplets = check_output(check, "triplets", sizeof *s.triplets, 4);
    memset(s.book, 0, sizeof *s.book);
    s.book->direction_bits = direction_bits;
    s.book->norm_bits = norm_bits;
    s.book->rounding = (kvant_triplet_rounding)rounding;
    fill_levels(check, direction_bits, false, COUNT(s.book->direction), s.book->direction,
                s.book->direction_thresholds);
    fill_levels(check, norm_bits, true, COUNT(s.book->norm), s.book->norm, s.book->norm_thresholds);
    check_floats(check, s.triplets->x, n, fill);
    check_floats(check, s.triplets->y, n, fill == CHECK_ZEROS ? CHECK_ZEROS : CHECK_NORMAL);
    check_floats(check, s.triplets->z, n, fill);
    return s;
}

CHECK(triplet_codes)
{
    static kvant_triplets want;
    for (uint32_t n = 16; n <= KVANT_MAX_TRIPLETS; n += n < 64 ? 16 : 64)
        for (uint32_t bits = 1; bits <= 8; bits++)
            for (uint32_t rounding = 0; rounding < 4; rounding++)
                for (int fill = 0; fill < CHECK_N_FILLS; fill++) {
                    if (rounding == KVANT_ROUND_FULL && (bits > 4 || n > 16))
                        continue; /* a search of 4^bits candidates */
                    search s = make_search(check, n, bits, check_below(check, 8), rounding,
                                           (check_fill)fill);
                    want = *s.triplets;
                    c->triplet_codes(s.book, n, &want);
                    CHECK_CALL(check, kernels->triplet_codes(s.book, n, s.triplets));
                    check_same(check, "code", s.triplets->code, want.code, KVANT_MAX_TRIPLETS,
                               sizeof *want.code);
                    check_same(check, "along", s.triplets->along, want.along, KVANT_MAX_TRIPLETS,
                               sizeof *want.along);
                    check_same(check, "norm", s.triplets->norm, want.norm, KVANT_MAX_TRIPLETS,
                               sizeof *want.norm);
                }
}

BENCH(triplet_codes)
{
    for (uint32_t rounding = 1; rounding < 4; rounding++) {
        search s = make_search(check, 48, 5, 2, rounding, CHECK_NORMAL);
        CHECK_BENCH(check, kernels->triplet_codes(s.book, 48, s.triplets),
                    "48, 5 + 2 bits, rounding %u", rounding);
    }
}

typedef struct chunks {
    float *x, *entries;
    uint32_t *which;
    size_t stride;
} chunks;

static chunks make_chunks(checker *check, uint32_t n, uint32_t spare, check_fill fill)
{
    chunks p = { .stride = 16 + spare };
    check_case(check, "%u entries, stride %zu, %s", n, p.stride, check_fill_name(fill));
    p.x = check_input(check, "x", (3 * p.stride + 16) * sizeof *p.x, sizeof *p.x);
    p.entries = check_input(check, "entries", (size_t)4 * n * sizeof *p.entries, sizeof *p.entries);
    p.which = check_output(check, "which", 16 * sizeof *p.which, sizeof *p.which);
    check_floats(check, p.x, 3 * p.stride + 16, fill);
    check_floats(check, p.entries, (size_t)4 * n, CHECK_NORMAL);
    for (uint32_t i = 0; n > 2 && i < 4; i++) /* equal distances: the first one wins */
        p.entries[4 * (n - 1) + i] = p.entries[4 * (n / 2) + i];
    return p;
}

static void check_chunks(checker *check, kvant_closest_cosets_fn *kernel,
                         kvant_closest_cosets_fn *c)
{
    static const uint32_t counts[] = { 1, 2, 3, 7, 8, 17, 64, 96, 256, 4096 };
    uint32_t want[16] = { 0 };
    for (size_t i = 0; i < COUNT(counts); i++)
        for (uint32_t spare = 0; spare < 4; spare++)
            for (int fill = 0; fill < CHECK_N_FILLS; fill++) {
                chunks p = make_chunks(check, counts[i], spare * 5, (check_fill)fill);
                if (check_compares(check))
                    c(p.x, p.stride, p.entries, counts[i], want);
                CHECK_CALL(check, kernel(p.x, p.stride, p.entries, counts[i], p.which));
                check_same(check, "which", p.which, want, 16, sizeof *want);
            }
}

static void bench_chunks(checker *check, kvant_closest_cosets_fn *kernel)
{
    static const uint32_t counts[] = { 16, 96, 256 };
    for (size_t i = 0; i < COUNT(counts); i++) {
        chunks p = make_chunks(check, counts[i], 0, CHECK_NORMAL);
        CHECK_BENCH(check, kernel(p.x, p.stride, p.entries, counts[i], p.which),
                    "16 chunks, %u entries", counts[i]);
    }
}

/* Both searches have the same signature. */
CHECK(closest_cosets)
{
    check_chunks(check, kernels->closest_cosets, c->closest_cosets);
}

BENCH(closest_cosets)
{
    bench_chunks(check, kernels->closest_cosets);
}

CHECK(largest_products)
{
    check_chunks(check, kernels->largest_products, c->largest_products);
}

BENCH(largest_products)
{
    bench_chunks(check, kernels->largest_products);
}
