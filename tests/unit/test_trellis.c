/* test_trellis.c - trellis codes: their distortion, how near the trellis search comes to the best
 * path, and the rows that a page decodes to. */
#include "distortion.h"

#include "../../src/codec/trellis_book.h"

/* No code of b bits errs less than 2^-2b (Shannon). No scalar code errs less than Max's quantiser
 * (1960), whose errors are 0.1175, 0.03454 and 0.009497. A trellis of 256 states saves at least its
 * granular gain of 1.32 dB, a factor of 0.738. Marcellin and Fischer (1990) have it 0.21 dB short
 * of the 1.53 dB of a sphere.
 *
 * `most` is not from theory. It is the error that this trellis had when it was made, and 1 % more.
 * It guards against a regression. */
static void distortion_meets_its_aims(void **state)
{
    static const struct {
        const char *spec, *same_size;
        int bits;
        double scalar, most;
    } aims[] = {
        { "trellis-2:scale=norm", "turboquant-2", 2, .1175, .0745 },
        { "trellis-3:scale=norm", "turboquant-3", 3, .03454, .0200 },
        { "trellis-4:scale=norm", "turboquant-4", 4, .009497, .0053 },
        { "trellis-2:states=1024,scale=norm", "turboquant-2", 2, .1175, .0740 },
    };
    (void)state;
    for (size_t i = 0; i < COUNT(aims); i++) {
        distortion d = measure(aims[i].spec, 128, 30);
        if (!(d.mse >= pow(4, -aims[i].bits)))
            fail_msg("%s: mse %.5f is below what any code can reach: it is measured wrongly",
                     aims[i].spec, d.mse);
        assert_true(d.mse <= .738 * aims[i].scalar);
        if (!(d.mse <= aims[i].most))
            fail_msg("%s: mse %.5f, not at most %.5f", aims[i].spec, d.mse, aims[i].most);
        kvant_codec *codec = make_codec(aims[i].spec, 128, KVANT_ROLE_K);
        kvant_codec *other = make_codec(aims[i].same_size, 128, KVANT_ROLE_K);
        assert_int_equal(info_of(codec).page_bytes, info_of(other).page_bytes);
        kvant_codec_free(&codec);
        kvant_codec_free(&other);
    }
}

/* One random product of unit vectors in n has the standard error sqrt(D / n). */
static void products_are_unbiased(void **state)
{
    (void)state;
    for (uint32_t bits = 2; bits <= 4; bits++) {
        char spec[32];
        snprintf(spec, sizeof spec, "trellis-%u", bits);
        distortion d = measure(spec, 128, 100);
        assert_true(fabs(d.slope - 1) <= 3 * sqrt(d.mse / (64 * 100)));
    }
}

/* --- The search --- */

enum { STEPS = 32, STATES = 256, CASES = 24 };

/* The subset that belongs to a window of memory + 1 bits, whose newest bit is the lowest. */
static uint32_t subset_of(const kvant_trellis *trellis, uint32_t window)
{
    const uint32_t ends = (window ^ window >> trellis->memory) & 1;
    const uint32_t middle = window >> 1 & ((1u << (trellis->memory - 1)) - 1);
    return trellis->subsets[middle][0] / 2u ^ (ends ? KVANT_TRELLIS_SWAP : 0);
}

/* The least cost of a circular path that begins in a state, by dynamic programming. It uses only
 * the tables of the library. */
static uint64_t least_from(const kvant_trellis *trellis, const uint16_t *cells, uint32_t begin)
{
    uint64_t cost[STATES], next[STATES];
    for (uint32_t s = 0; s < STATES; s++)
        cost[s] = s == begin ? 0 : UINT32_MAX;
    for (uint32_t step = 0; step < STEPS; step++) {
        for (uint32_t s = 0; s < STATES; s++)
            next[s] = UINT32_MAX;
        for (uint32_t s = 0; s < STATES; s++)
            for (uint32_t bit = 0; bit < 2; bit++) {
                const uint32_t window = 2 * s + bit;
                const uint64_t sum =
                    cost[s] + trellis->costs[cells[step]][subset_of(trellis, window)];
                next[window % STATES] = sum < next[window % STATES] ? sum : next[window % STATES];
            }
        memcpy(cost, next, sizeof cost);
    }
    return cost[begin];
}

static uint64_t cost_of(const kvant_trellis *trellis, const uint16_t *cells, const uint8_t *bits)
{
    uint64_t sum = 0;
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t window = 0;
        for (uint32_t j = 0; j <= trellis->memory; j++)
            window |= (uint32_t)bits[(step + STEPS - j) % STEPS] << j;
        sum += trellis->costs[cells[step]][subset_of(trellis, window)];
    }
    return sum;
}

/* No path is cheaper than the best path over all first states, and the search finds that path in
 * most cases. These rows are short, so the first state matters more than in any codec. Costs are
 * relative to the nearest of all levels. */
static void search_finds_the_best_path_mostly(void **state)
{
    (void)state;
    uint64_t rng = 7;
    kvant_codec *codec = make_codec("trellis-3", 128, KVANT_ROLE_K);
    const kvant_trellis *trellis = &kvant_trellis_book_of(codec)->trellis;
    _Alignas(64) static uint16_t metric[2 * STATES];
    static uint32_t decisions[STEPS * STATES / 32];
    const kvant_trellis_work work = { metric, decisions, STEPS };
    uint32_t found = 0;
    for (uint32_t i = 0; i < CASES; i++) {
        float x[STEPS];
        uint16_t cells[STEPS];
        uint8_t bits[STEPS];
        fill_normal(x, STEPS, &rng);
        for (uint32_t step = 0; step < STEPS; step++)
            cells[step] = (uint16_t)(lrintf(fminf(fmaxf(64 * x[step], -256), 255)) + 256);
        uint64_t best = UINT64_MAX;
        for (uint32_t begin = 0; begin < STATES; begin++) {
            const uint64_t cost = least_from(trellis, cells, begin);
            best = cost < best ? cost : best;
        }
        kvant_kernels_get(KVANT_CPU_AUTO)->trellis_path(trellis, cells, STEPS, &work, bits);
        const uint64_t cost = cost_of(trellis, cells, bits);
        assert_true(cost >= best);
        found += cost == best;
    }
    if (found < CASES / 2)
        fail_msg("the best of %d paths was found in %u cases only", CASES, found);
    kvant_codec_free(&codec);
}

/* --- Tables --- */

/* Every channel is a step, and no two are the same. */
static void steps_are_a_permutation(void **state)
{
    (void)state;
    for (uint32_t dim = 4; dim <= KVANT_MAX_HEAD_DIM; dim += dim < 200 ? 4 : 52)
        for (uint32_t bits = 2; bits <= 4; bits++)
            for (int role = 0; role < 2; role++) {
                char spec[48];
                snprintf(spec, sizeof spec, "trellis-%u:rotate=none", bits);
                kvant_codec *codec = make_codec(spec, dim, (kvant_role)role);
                const kvant_trellis_book *book = kvant_trellis_book_of(codec);
                bool seen[KVANT_TRELLIS_MAX_STEPS] = { false };
                assert_int_equal(book->trellis.n_steps, codec->layout.padded_dim);
                for (uint32_t j = 0; j < codec->layout.padded_dim; j++) {
                    assert_true(book->trellis.steps[j] < book->trellis.n_steps &&
                                !seen[book->trellis.steps[j]]);
                    seen[book->trellis.steps[j]] = true;
                }
                kvant_codec_free(&codec);
            }
}

/* Symmetries that kernels rely on: levels are negatives of one another. The newest and the oldest
 * bit of a window enter parity 1 and no other parity. */
static void tables_have_their_symmetries(void **state)
{
    static const char *const specs[] = { "trellis-2", "trellis-3:states=1024",
                                         "trellis-4:states=4096" };
    (void)state;
    for (size_t i = 0; i < COUNT(specs); i++) {
        kvant_codec *codec = make_codec(specs[i], 64, KVANT_ROLE_V);
        const kvant_trellis *trellis = &kvant_trellis_book_of(codec)->trellis;
        const uint32_t n = 4u << trellis->bits, ends = 1u | 1u << trellis->memory;
        for (uint32_t m = 0; m < n; m++) {
            assert_int_equal(trellis->levels[m], -trellis->levels[n - 1 - m]);
            assert_true(m == 0 || trellis->levels[m] >= trellis->levels[m - 1]);
        }
        assert_int_equal(trellis->taps[0] & ends, 0);
        assert_int_equal(trellis->taps[1] & ends, ends);
        assert_int_equal(trellis->taps[2] & ends, 0);
        for (uint32_t window = 0; window < 2u << trellis->memory; window++) {
            uint32_t z = 0;
            for (uint32_t p = 0; p < 3; p++)
                for (uint32_t j = 0; j <= trellis->memory; j++)
                    z ^= (window & trellis->taps[p]) >> j & 1 ? 1u << p : 0;
            assert_int_equal(subset_of(trellis, window), z);
        }
        kvant_codec_free(&codec);
    }
}

/* The contract of the kernel trellis_path with 256 states: bit 6 of a window enters no parity. It
 * is bit 5 of the windows that have subsets. The test tests/kernels/check_trellis.c makes only such
 * tables. */
static void bit_6_changes_no_subset_of_256_states(void **state)
{
    (void)state;
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (uint32_t head_dim = 64; head_dim <= 128; head_dim += 64) {
            char spec[32];
            snprintf(spec, sizeof spec, "trellis-%u:states=256", bits);
            kvant_codec *codec = make_codec(spec, head_dim, KVANT_ROLE_K);
            const kvant_trellis *trellis = &kvant_trellis_book_of(codec)->trellis;
            assert_int_equal(trellis->memory, 8);
            for (uint32_t p = 0; p < KVANT_TRELLIS_PARITIES; p++)
                assert_int_equal(trellis->taps[p] & 1 << 6, 0);
            for (uint32_t i = 0; i < STATES / 2; i++)
                assert_memory_equal(trellis->subsets[i], trellis->subsets[i ^ 1 << 5],
                                    sizeof trellis->subsets[i]);
            kvant_codec_free(&codec);
        }
}

static void specs(void **state)
{
    static const char *const wrong[] = { "trellis",       "trellis-1",
                                         "trellis-5",     "trellis-4:states=512",
                                         "trellis-4:qjl", "trellis-2.5" };
    (void)state;
    for (size_t i = 0; i < COUNT(wrong); i++) {
        kvant_codec *codec;
        assert_int_equal(kvant_codec_create(wrong[i], 64, KVANT_ROLE_K, TEST_SEED, &codec, NULL, 0),
                         KVANT_ERR_SPEC);
    }
    kvant_codec *codec = make_codec("trellis-3:states=1024", 64, KVANT_ROLE_K);
    assert_string_equal(
        info_of(codec).spec,
        "trellis-3:states=1024,scale=unbiased,rotate=hadamard,block=64,signs=seed,seed=7");
    kvant_codec_free(&codec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(distortion_meets_its_aims),
        cmocka_unit_test(products_are_unbiased),
        cmocka_unit_test(search_finds_the_best_path_mostly),
        cmocka_unit_test(steps_are_a_permutation),
        cmocka_unit_test(tables_have_their_symmetries),
        cmocka_unit_test(specs),
        cmocka_unit_test(bit_6_changes_no_subset_of_256_states),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
