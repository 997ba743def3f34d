/* test_trellis.c - trellis codes: their distortion, how near the trellis search comes to the best
 * path, and the rows that a page decodes to. */
#include "distortion.h"

#include "../../src/codec/trellis_book.h"

/* No code of b bits errs less than 2^-2b (Shannon). No scalar code errs less than Max's quantiser
 * (1960), whose errors are 0.1175, 0.03454 and 0.009497. A sphere saves 1.53 dB of this. The test
 * asks the trellis to save 1.2 dB, a factor of 0.759.
 *
 * `most` is not from theory. It is the error that this trellis had when it was made, and 1 % more.
 * It guards against a regression. */
CASE(distortion_meets_its_aims)
{
    static const struct {
        const char *spec, *same_size;
        int bits;
        double scalar, most;
    } aims[] = {
        { "trellis-2:scale=norm", "turboquant-2", 2, .1175, .0775 },
        { "trellis-3:scale=norm", "turboquant-3", 3, .03454, .0206 },
        { "trellis-4:scale=norm", "turboquant-4", 4, .009497, .0054 },
    };
    for (size_t i = 0; i < COUNT(aims); i++) {
        distortion d = measure(aims[i].spec, 128, 30);
        if (!(d.mse >= pow(4, -aims[i].bits)))
            fail_msg("%s: mse %.5f is below what any code can reach: it is measured wrongly",
                     aims[i].spec, d.mse);
        assert_true(d.mse <= .759 * aims[i].scalar);
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
CASE(products_are_unbiased)
{
    for (uint32_t bits = 2; bits <= 4; bits++) {
        char spec[32];
        snprintf(spec, sizeof spec, "trellis-%u", bits);
        distortion d = measure(spec, 128, 100);
        assert_true(fabs(d.slope - 1) <= 3 * sqrt(d.mse / (64 * 100)));
    }
}

/* --- The search --- */

enum { STEPS = 32, STATES = KVANT_TRELLIS_STATES, CASES = 100 };

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
                    cost[s] + trellis->costs[cells[step]][kvant_trellis_subset(window)];
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
        for (uint32_t j = 0; j <= KVANT_TRELLIS_MEMORY; j++)
            window |= (uint32_t)bits[(step + STEPS - j) % STEPS] << j;
        sum += trellis->costs[cells[step]][kvant_trellis_subset(window)];
    }
    return sum;
}

/* No path is cheaper than the best path over all first states, and on average the search finds a
 * path that costs hardly more. These rows are short, so the first state matters more than in any
 * codec. Costs are relative to the nearest of all levels. */
CASE(search_finds_nearly_the_best_path)
{
    uint64_t rng = 7;
    kvant_codec *codec = make_codec("trellis-3", 128, KVANT_ROLE_K);
    const kvant_trellis *trellis = &kvant_trellis_book_of(codec)->trellis;
    uint64_t all = 0, least = 0;
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
        kvant_kernels_get(KVANT_CPU_AUTO)->trellis_path(trellis, cells, STEPS, bits);
        const uint64_t cost = cost_of(trellis, cells, bits);
        assert_true(cost >= best);
        all += cost;
        least += best;
    }
    if (!(least > 0 && (double)all <= 1.08 * (double)least))
        fail_msg("paths cost %g times as much as the best", (double)all / (double)least);
    kvant_codec_free(&codec);
}

/* --- The search by its definition, in whole numbers without a limit --- */

#define INFINITE (UINT64_MAX / 2)

/* A pass of format.md, "Trellis codes"; came[step][state]: the state before. */
static void exact_pass(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,
                       uint32_t before, uint64_t metric[STATES], uint8_t (*came)[STATES])
{
    uint64_t next[STATES];
    for (uint32_t k = 0; k < before + n; k++) {
        const uint32_t step = (k + before * (n - 1)) % n, cell = cells[step];
        for (uint32_t state = 0; state < STATES; state++) {
            next[state] = INFINITE;
            for (uint32_t old = state / 2; old < STATES; old += STATES / 2) {
                const uint32_t z = kvant_trellis_subset(2 * old | (state & 1));
                const uint64_t sum =
                    metric[old] == INFINITE ? INFINITE : metric[old] + trellis->costs[cell][z];
                if (old < STATES / 2 || sum < next[state]) {
                    next[state] = sum;
                    if (k >= before)
                        came[step][state] = (uint8_t)old;
                }
            }
            if (cell == KVANT_TRELLIS_NO_NUMBER && state & 1)
                next[state] = INFINITE;
        }
        memcpy(metric, next, sizeof next);
    }
}

static uint32_t exact_trace(uint8_t (*came)[STATES], uint32_t n, uint32_t state, uint8_t *bits)
{
    for (uint32_t step = n; step-- > 0; state = came[step][state])
        bits[step] = state & 1;
    return state;
}

static void exact_path(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,
                       uint8_t *bits)
{
    static uint8_t came[KVANT_TRELLIS_MAX_STEPS][STATES];
    uint64_t metric[STATES] = { 0 };
    uint32_t end = 0;
    exact_pass(trellis, cells, n, 24, metric, came);
    for (uint32_t state = 1; state < STATES; state++)
        end = metric[state] < metric[end] ? state : end;
    for (uint32_t tries = 0; tries < 4; tries++) {
        const uint32_t begin = exact_trace(came, n, end, bits);
        if (begin == end)
            return;
        end = begin;
    }
    for (uint32_t state = 0; state < STATES; state++)
        metric[state] = state == end ? 0 : INFINITE;
    exact_pass(trellis, cells, n, 0, metric, came);
    exact_trace(came, n, end, bits);
}

/* Kernels have metrics of 16 bits. With the largest costs and runs of padding they find the path
 * that whole numbers without a limit give. */
CASE(sixteen_bits_are_enough)
{
    static const uint32_t steps[] = { 16, 48, 128, 400 };
    static kvant_trellis trellis;
    uint64_t rng = 21;
    for (uint32_t i = 0; i < 400; i++) {
        uint16_t cells[KVANT_TRELLIS_MAX_STEPS];
        uint8_t want[KVANT_TRELLIS_MAX_STEPS], got[KVANT_TRELLIS_MAX_STEPS];
        const uint32_t n = steps[i % COUNT(steps)], padding = i / 4 % 4, choices = 1 + i % 3;
        for (uint32_t cell = 0; cell < KVANT_TRELLIS_CELLS; cell++)
            for (uint32_t z = 0; z < KVANT_TRELLIS_SUBSETS; z++) /* of 3: 4095, 1365 and 2730 */
                trellis.costs[cell][z] =
                    (uint16_t)(4095 - test_random(&rng) % choices * (4095 / choices));
        for (uint32_t step = 0; step < n; step++) {
            const bool none = padding == 3 ? step % 16 >= 4 : test_random(&rng) % 8 < 2 * padding;
            cells[step] = none ? KVANT_TRELLIS_NO_NUMBER
                               : (uint16_t)(test_random(&rng) % KVANT_TRELLIS_CELLS);
        }
        exact_path(&trellis, cells, n, want);
        kvant_kernels_get(KVANT_CPU_AUTO)->trellis_path(&trellis, cells, n, got);
        assert_memory_equal(got, want, n);
    }
}

/* --- Tables --- */

/* Every channel is a step, and no two are the same. */
CASE(steps_are_a_permutation)
{
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

/* Levels are negatives of one another. */
CASE(levels_are_symmetric)
{
    for (uint32_t bits = 2; bits <= 4; bits++) {
        char spec[16];
        snprintf(spec, sizeof spec, "trellis-%u", bits);
        kvant_codec *codec = make_codec(spec, 64, KVANT_ROLE_V);
        const kvant_trellis *trellis = &kvant_trellis_book_of(codec)->trellis;
        const uint32_t n = 4u << bits;
        for (uint32_t m = 0; m < n; m++) {
            assert_int_equal(trellis->levels[m], -trellis->levels[n - 1 - m]);
            assert_true(m == 0 || trellis->levels[m] >= trellis->levels[m - 1]);
        }
        kvant_codec_free(&codec);
    }
}

/* Kernels write the function from windows to subsets in several ways, and rely on the fact that the
 * newest and the oldest bit enter parity 1 and no other parity. */
CASE(subsets_are_parities_of_taps)
{
    static const uint32_t taps[] = { KVANT_TRELLIS_TAP_0, KVANT_TRELLIS_TAP_1,
                                     KVANT_TRELLIS_TAP_2 };
    uint8_t bits[2 * STATES] = { 0 }, subsets[2 * STATES];
    for (uint32_t window = 0; window < 2 * STATES; window++) {
        uint32_t z = 0;
        for (uint32_t p = 0; p < COUNT(taps); p++)
            for (uint32_t j = 0; j <= KVANT_TRELLIS_MEMORY; j++)
                z ^= (window & taps[p]) >> j & 1 ? 1u << p : 0;
        assert_int_equal(kvant_trellis_subset(window), z);
        assert_int_equal(kvant_trellis_subset(window ^ (1 | STATES)), z);
        assert_int_equal(kvant_trellis_subset(window ^ 1), z ^ KVANT_TRELLIS_SWAP);
        for (uint32_t j = 0; j <= KVANT_TRELLIS_MEMORY; j++) /* the window of the step before 0 */
            bits[2 * STATES - 1 - j] = window >> j & 1;
        kvant_trellis_subsets(bits, 2 * STATES, subsets);
        assert_int_equal(subsets[2 * STATES - 1], z);
    }
}

CASE(specs)
{
    static const char *const wrong[] = { "trellis", "trellis-1", "trellis-5", "trellis-4:qjl",
                                         "trellis-2.5" };
    for (size_t i = 0; i < COUNT(wrong); i++)
        expect_bad_spec(wrong[i], 64, KVANT_ERR_SPEC, "");
    expect_bad_spec("trellis-4:states=256", 64, KVANT_ERR_SPEC,
                    "trellis has no option 'states': leave it out");
    kvant_codec *codec = make_codec("trellis-3", 64, KVANT_ROLE_K);
    assert_string_equal(info_of(codec).spec,
                        "trellis-3:scale=unbiased,rotate=hadamard,block=64,signs=seed,seed=7");
    kvant_codec_free(&codec);
}

RUN_CASES(NULL, NULL)
