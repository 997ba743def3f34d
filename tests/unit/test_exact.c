/* test_exact.c - the exact part of a cache. The first and newest tokens of each sequence, and the
 * rows of a step, are fp16 whatever is written, cut or forked. All other rows are sealed. */
#include "tensor_fixture.h"

#include <kvant/cache.h>

#include "../../src/cache/tensor.h"

static const kvant_exact_part usual = {
    .size = sizeof usual, .first = 64, .newest = 128, .total = 192, .step = 512
};

static fixture make_exact(const char *spec, uint32_t n_sequences, uint32_t blocks,
                          const kvant_exact_part *part)
{
    fixture f = make(spec, n_sequences, blocks, 0);
    fixture exact = f;
    exact.params.exact = part;
    kvant_tensor_free(&f.tensor);
    free(f.memory);
    free(f.rows);
    make_tensor(&exact);
    return exact;
}

static uint32_t n_open(const fixture *f)
{
    uint32_t n = 0;
    for (uint32_t block = 0; block < f->params.n_blocks; block++)
        n += is_open(f, block);
    return n;
}

/* Rows of a sequence are written in steps of any length. The newest rows before a step and at least
 * the last 512 rows of the step itself are exact after it, and a block of older rows is sealed.
 * clock: how many rows were written to the sequence before. */
static void write_and_check_ends(fixture *f, uint64_t seed, uint64_t clock)
{
    uint64_t rng = seed;
    f->tensor->clocks[0] = clock;
    for (uint32_t n = 0, step; n < 4000; n += step) {
        static const uint32_t most[] = { 1, 9, 64, 512, 700 };
        step = 1 + (uint32_t)(test_random(&rng) % most[test_random(&rng) % COUNT(most)]);
        step = step < 4000 - n ? step : 4000 - n;
        write_range(f, n, step, step, 1 + (uint32_t)seed % 2, &rng);
        const uint32_t end = n + step, kept = step < 512 ? 128 + step : 512;
        for (uint32_t block = 0; block < (end + 63) / 64; block++) {
            const uint32_t last = 64 * block + 63;
            if (block == 0 || last + kept >= end)
                assert_true(is_open(f, block));
            else if (step <= 512 && last + 128 < n)
                assert_false(is_open(f, block));
        }
        assert_true(n_open(f) <= 3 + 1 + 8);
    }
}

CASE(first_and_newest_rows_are_exact)
{
    static const char *const specs[] = { "int-4", "turboquant-2", "int-2:axis=channel",
                                         "int-4:center=first", "int-4:sink=4,recent=40" };
    for (size_t s = 0; s < COUNT(specs); s++)
        for (uint64_t seed = 1; seed < 5; seed++) {
            fixture f = make_exact(specs[s], 1, 64, &usual);
            const bool exact_numbers =
                strncmp(specs[s], "int", 3) == 0 && !strstr(specs[s], "center");
            write_and_check_ends(&f, seed, 0);
            if (exact_numbers && !strstr(specs[s], "axis"))
                check_slots(&f, 0, 4000);
            drop(&f);
        }
}

/* A server writes more rows to a sequence than an int32_t counts. */
CASE(after_billions_of_rows_the_newest_are_exact)
{
    static const uint64_t clocks[] = { (UINT64_C(1) << 30) - 1000, INT32_MAX - 1000, INT32_MAX,
                                       UINT64_C(1) << 40 };
    for (size_t i = 0; i < COUNT(clocks); i++) {
        fixture f = make_exact("int-4", 1, 64, &usual);
        write_and_check_ends(&f, 1 + i, clocks[i]);
        write_and_check_ends(&f, 5 + i, clocks[i]); /* to the same slots */
        check_slots(&f, 0, 4000);
        drop(&f);
    }
}

/* The codes of a row do not depend on the steps that wrote it or on later rows. */
CASE(steps_and_threads_do_not_change_bytes)
{
    static const char *const specs[] = { "turboquant-4", "trellis-3", "int-2:axis=channel" };
    static const uint32_t steps[] = { 1, 7, 64, 512, 700 };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 33;
        fixture first = make_exact(specs[s], 1, 11, &usual);
        write_range(&first, 0, 700, steps[0], 1, &rng);
        for (size_t b = 1; b < COUNT(steps); b++) {
            fixture f = make_exact(specs[s], 1, 11, &usual);
            write_rows(&f, 0, 700, first.rows, steps[b], (uint32_t)b + 1);
            for (uint32_t block = 0; block < 11; block++)
                for (uint32_t h = 0;
                     h < N_KV_HEADS && !is_open(&f, block) && !is_open(&first, block); h++)
                    assert_memory_equal(block_of(&f, block, h).page,
                                        block_of(&first, block, h).page,
                                        info_of(f.codecs[h]).page_bytes);
            drop(&f);
        }
        assert_false(is_open(&first, 1));
        drop(&first);
    }
}

/* A draft of eight tokens of which four are rejected: their slots are written again. The four count
 * once, so the window before the next draft ends with row n + 3. */
CASE(rejected_rows_make_no_row_older)
{
    uint64_t rng = 5;
    fixture f = make_exact("int-4", 1, 20, &usual);
    write_range(&f, 0, 300, 300, 1, &rng);
    for (uint32_t n = 300; n < 1000; n += 4) {
        write_range(&f, n, 8, 8, 1, &rng);
        for (uint32_t row = n + 4 - 128; row < n + 8; row++)
            assert_true(is_open(&f, row / 64));
        for (uint32_t block = 1; 64 * block + 64 + 128 + 8 <= n; block++)
            assert_false(is_open(&f, block));
    }
    drop(&f);
}

/* A text that is written to the slots of an earlier text has the same window as the first text,
 * although some of the earlier rows are still exact. Each text is longer than its exact part.
 * Blocks beyond the text hold earlier rows. */
CASE(a_text_in_used_slots_has_the_same_window)
{
    static const uint32_t lengths[] = { 600, 374, 300, 900, 450 }, most[] = { 1, 9, 64, 512 };
    for (uint64_t seed = 1; seed < 9; seed++) {
        uint64_t rng = seed;
        fixture f = make_exact("int-4", 1, 20, &usual);
        for (size_t text = 0; text < COUNT(lengths); text++)
            for (uint32_t n = 0, step; n < lengths[text]; n += step) {
                step = 1 + (uint32_t)(test_random(&rng) % most[seed % COUNT(most)]);
                step = step < lengths[text] - n ? step : lengths[text] - n;
                write_range(&f, n, step, step, 1, &rng);
                for (uint32_t block = 1; 64 * block + 64 <= n + step; block++)
                    assert_int_equal(is_open(&f, block), 64 * block + 63 + 128 >= n);
            }
        drop(&f);
    }
}

/* A row reads as it was written, or as the codec decodes it. When a sealed block becomes exact
 * again, its rows are rounded to fp16, by half a unit of 2^-10. */
static void check_rows(const fixture *f, uint32_t first, uint32_t n)
{
    for (uint32_t slot = first; slot < first + n; slot++) {
        float got[WIDTH], want[WIDTH];
        read_slot(f, slot, got);
        if (memcmp(got, f->rows + (size_t)slot * WIDTH, sizeof got) == 0)
            continue;
        through_codec(f, f->rows + (size_t)slot * WIDTH, want);
        for (uint32_t j = 0; j < WIDTH; j++)
            assert_true(fabsf(got[j] - want[j]) <=
                        (is_open(f, slot / 64) ? fabsf(want[j]) / 2048 + 6e-8f : 0));
    }
}

/* The exact part of all sequences together is bounded: here, by the tokens of two sequences. The
 * sequence that is written keeps its own
 * part. The newest tokens of other sequences are sealed before their first tokens, and the first
 * tokens of the sequence that was written last are sealed last. */
CASE(the_bound_of_all_sequences_holds)
{
    const kvant_exact_part part = {
        .size = sizeof part, .first = 64, .newest = 64, .total = 256, .step = 64
    };
    enum { SEQUENCES = 6, BLOCKS = 8, PAGES = 4 + 2 + 1 };
    uint64_t rng = 9;
    fixture f = make_exact("int-4", SEQUENCES, BLOCKS, &part);
    const size_t sealed = SEQUENCES * BLOCKS * N_KV_HEADS * info_of(f.codecs[0]).page_bytes;
    assert_int_equal(f.bytes, sealed + PAGES * N_KV_HEADS * HEAD_DIM * 64 * 2);
    uint32_t n[SEQUENCES] = { 0 };
    for (uint32_t round = 0; round < 5; round++)
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            const uint32_t first = n[s];
            while (n[s] < first + 90) {
                const uint32_t step = n[s] + 32 < first + 90
                                          ? 1 + (uint32_t)(test_random(&rng) % 32)
                                          : first + 90 - n[s];
                write_range(&f, s * BLOCKS * 64 + n[s], step, step, 1, &rng);
                n[s] += step;
                assert_true(n_open(&f) <= PAGES);
            }
            for (uint32_t row = first; row < n[s];
                 row++) /* rows of this round before the window of 64 may be sealed */
                assert_true(row + 64 < n[s] || is_open(&f, s * BLOCKS + row / 64));
            const uint32_t former = (s + SEQUENCES - 1) % SEQUENCES;
            assert_true(round > 0 || n[former] == 0 || is_open(&f, former * BLOCKS));
            assert_true(round > 0 || is_open(&f, s * BLOCKS));
        }
    for (uint32_t s = 0; s < SEQUENCES; s++)
        check_rows(&f, s * BLOCKS * 64, n[s]);
    drop(&f);
}

/* Codecs whose pages are fp16 rows need no exact pages. A wrong exact part is refused. */
CASE(sizes)
{
    static const kvant_exact_part bad[] = {
        { .size = sizeof *bad, .first = 32, .newest = 64, .total = 96, .step = 1 },
        { .size = sizeof *bad, .first = 64, .newest = 64, .total = 127, .step = 1 },
        { .size = sizeof *bad, .first = 64, .newest = 64, .total = 128 },
        { .size = 4, .first = 64, .newest = 64, .total = 128, .step = 1 }
    };
    const kvant_exact_part none = { .size = sizeof none };
    const char *const specs[] = { "f16", "int-4", "int-4:center=first", "int-4:recent=100" };
    for (size_t s = 0; s < COUNT(specs); s++) {
        fixture f = make(specs[s], 2, 40, 0);
        kvant_tensor_params params = params_of(&f);
        size_t bytes;
        params.exact = &none;
        assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
        assert_int_equal(bytes, f.bytes);
        params.exact = &usual;
        assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
        /* recent=100: two sequences have windows of 3 blocks, and two blocks are spare. The exact
         * part: 3 blocks and one more. A step: 8 blocks. */
        const size_t pages = s == 0 ? 0 : s == 3 ? 2 * 3 + 2 + 8 : 3 + 1 + 8;
        const size_t sealed = 2 * 40 * N_KV_HEADS * info_of(f.codecs[0]).page_bytes;
        assert_int_equal(bytes, sealed + pages * N_KV_HEADS * HEAD_DIM * 64 * 2);
        params.n_blocks = 5;
        params.blocks_per_sequence = 3;
        assert_ok(kvant_tensor_size(&params, &bytes)); /* no more pages than blocks */
        assert_true(bytes <=
                    5 * N_KV_HEADS * (info_of(f.codecs[0]).page_bytes + HEAD_DIM * 64 * 2));
        for (size_t i = 0; i < COUNT(bad); i++) {
            params.exact = &bad[i];
            assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_ERR_ARGUMENT);
        }
        drop(&f);
    }
}

/* An exact part without first tokens has no sinks either, whatever sink= says, so a sliding
 * window's cache needs no page for them. A window of 64 rows begins anywhere, so it lies in 2
 * blocks; a step lies in one. */
CASE(without_first_tokens_there_are_no_sinks)
{
    const kvant_exact_part part = { .size = sizeof part, .newest = 64, .total = 64, .step = 64 };
    uint64_t rng = 3;
    fixture f = make_exact("int-4:sink=4", 4, 10, &part);
    const size_t sealed = 4 * 10 * N_KV_HEADS * info_of(f.codecs[0]).page_bytes;
    assert_int_equal(f.bytes, sealed + (2 + 1) * N_KV_HEADS * HEAD_DIM * 64 * 2);
    write_range(&f, 0, 600, 40, 1, &rng);
    assert_false(is_open(&f, 0));
    for (uint32_t row = 600 - 64; row < 600; row++)
        assert_true(is_open(&f, row / 64));
    check_slots(&f, 0, 600);
    drop(&f);
}

/* A block that is exact in one cache is imported into another cache with any exact part. */
CASE(open_blocks_are_imported)
{
    uint64_t rng = 12;
    fixture from = make_exact("int-4", 1, 8, &usual), to = make_exact("int-4", 1, 8, &usual);
    write_range(&from, 0, 400, 400, 1, &rng);
    write_range(&to, 0, 512, 512, 1, &rng); /* all pages are taken */
    for (uint32_t block = 0; block < 6; block++) {
        exported e = export_block(&from, block);
        assert_int_equal(kvant_tensor_import(to.tensor, block, e.data, e.bytes), KVANT_OK);
        assert_true(is_open(&to, block));
        free(e.data);
    }
    memcpy(to.rows, from.rows, 384 * WIDTH * sizeof(float));
    check_slots(&to, 0, 512);
    drop(&to);
    drop(&from);
}

/* A cache with sequences that grow, are cut, forked and freed. */

enum { D = 64, MOST_SEQUENCES = 3, MOST_TOKENS = 2000 };

typedef struct sequence {
    int32_t id; /* -1: free */
    uint32_t n,
        own; /* tokens; tokens before `own` came from another sequence or were shared with one */
    uint32_t begun; /* number of tokens when the last step began */
    /* rows before this one were older than the newest 128 rows when a step of any sequence began */
    uint32_t left;
    float k[MOST_TOKENS][D], v[MOST_TOKENS][D];
} sequence;

/* Whether a row is exact or a decoded 2-bit code.
 *
 * An exact row passes through fp16, a rotation and a matrix that is near the identity, because rows
 * have independent equal channels. Each number errs twice by at most 2^-11 of the transformed row's
 * number.
 *
 * By rate-distortion theory, 2 bits leave an error of at least 2^-2 of normal numbers in the mean.
 * For a single row of 64 this varies by some percent. */
static bool is_exact(const float *got, const float *want)
{
    const double error = sqrt(squared_distance(got, want, D)),
                 length = sqrt(squared_distance(want, (float[D]){ 0 }, D));
    assert_true(error < 0.01 * length || error > 0.1 * length);
    return error < 0.01 * length;
}

static void check_sequence(const kvant_cache *cache, const sequence *s, bool written)
{
    static float k[MOST_TOKENS][D], v[MOST_TOKENS][D];
    assert_int_equal(kvant_cache_read(cache, 0, s->id, 0, s->n, *k, *v), KVANT_OK);
    for (uint32_t row = s->own; row < s->n && written; row++) {
        const bool k_exact = is_exact(k[row], s->k[row]);
        const uint32_t last = row / 64 * 64 + 63; /* last row of the row's block */
        assert_int_equal(k_exact, is_exact(v[row], s->v[row]));
        if (row < 64 || row >= s->left)
            assert_true(k_exact);
        else if (last >= s->own && last + 128 < s->begun)
            assert_false(k_exact);
    }
}

static void append(kvant_cache *cache, sequence *s, uint32_t n, uint64_t *rng)
{
    s->begun = s->n;
    fill_normal(s->k[s->n], (size_t)n * D, rng);
    fill_normal(s->v[s->n], (size_t)n * D, rng);
    assert_int_equal(kvant_cache_append(cache, 0, s->id, s->k[s->n], s->v[s->n], n), KVANT_OK);
    s->n += n;
}

static void fork_to(kvant_cache *cache, sequence *from, sequence *to)
{
    const int32_t id = kvant_sequence_fork(cache, from->id);
    *to = *from;
    to->id = id;
    assert_true(id >= 0);
    from->own = to->own = from->n; /* from now on, a shared block belongs to one of the two */
}

static void cut(kvant_cache *cache, sequence *s, uint32_t n)
{
    assert_int_equal(kvant_sequence_truncate(cache, s->id, n), KVANT_OK);
    s->n = n;
    s->own = s->own < n ? s->own : n;
    s->left = s->left < n ? s->left : n;
}

/* With steps of at most 300 rows, the pool of 18 pages has room for all sequences. Each needs 4
 * blocks, and the step 5 more. */
CASE(random_sequences)
{
    static sequence all[MOST_SEQUENCES];
    for (uint64_t seed = 1; seed <= 6; seed++) {
        uint64_t rng = seed;
        kvant_cache_params params = KVANT_CACHE_PARAMS;
        kvant_cache *cache;
        params.n_layers = params.n_heads = params.n_kv_heads = 1;
        params.head_dim = D;
        params.max_tokens = 16384;
        params.max_sequences = MOST_SEQUENCES;
        params.n_threads = 1 + (uint32_t)seed % 2;
        params.preset = "tiny";
        assert_int_equal(kvant_cache_create(&params, &cache), KVANT_OK);
        for (uint32_t i = 0; i < MOST_SEQUENCES; i++)
            all[i].id = -1;
        for (uint32_t op = 0; op < 60; op++) {
            sequence *s = &all[test_random(&rng) % MOST_SEQUENCES],
                     *other = &all[test_random(&rng) % MOST_SEQUENCES];
            const uint32_t what = (uint32_t)(test_random(&rng) % 10);
            if (s->id < 0) {
                *s = (sequence){ .id = kvant_sequence_create(cache) };
                assert_true(s->id >= 0);
            }
            if (what == 0) {
                kvant_sequence_free(cache, s->id);
                s->id = -1;
                continue;
            }
            if (what == 1 && other->id < 0)
                fork_to(cache, s, other);
            else if (what < 4 && s->n > s->own)
                cut(cache, s, s->n - (uint32_t)(test_random(&rng) % (s->n - s->own)) % 100);
            const uint32_t n = 1 + (uint32_t)(test_random(&rng) % (what % 2 ? 3 : 300));
            const bool written = s->n + n <= MOST_TOKENS;
            for (uint32_t i = 0; i < MOST_SEQUENCES && written; i++)
                all[i].left = all[i].n > all[i].left + 128 ? all[i].n - 128 : all[i].left;
            if (written)
                append(cache, s, n, &rng);
            check_sequence(cache, s, written);
        }
        kvant_cache_free(&cache);
    }
}

/* The layers of a cache share the pages of a step. A layer's rows are exact until the next layer's
 * rows are written; after that its first 64 and newest 128 rows are. */
CASE(layers_keep_a_step_until_the_next_layer)
{
    enum { LAYERS = 3, N = 1500, STEP = 500 };
    static float k[LAYERS][N][D], v[LAYERS][N][D], got[2][N][D];
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    kvant_cache *cache;
    uint64_t rng = 8;
    params.n_layers = LAYERS;
    params.n_heads = params.n_kv_heads = 1;
    params.head_dim = D;
    params.max_tokens = 4096;
    params.preset = "tiny";
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_OK);
    const int32_t id = kvant_sequence_create(cache);
    for (uint32_t n = 0; n < N; n += STEP)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            fill_normal(k[layer][n], STEP * D, &rng);
            fill_normal(v[layer][n], STEP * D, &rng);
            assert_ok(kvant_cache_append(cache, layer, id, k[layer][n], v[layer][n], STEP));
            for (uint32_t before = 0; before < 2 && before <= layer; before++) {
                const uint32_t of = layer - before, end = n + STEP,
                               exact = (before ? end
                                        : n    ? n
                                               : 192) -
                                       128;
                assert_ok(kvant_cache_read(cache, of, id, 0, end, *got[0], *got[1]));
                for (uint32_t row = 0; row < end; row++) {
                    const bool k_exact = is_exact(got[0][row], k[of][row]);
                    assert_int_equal(k_exact, is_exact(got[1][row], v[of][row]));
                    if (row < 64 || row >= exact)
                        assert_true(k_exact);
                    else if (row < exact - 64)
                        assert_false(k_exact);
                }
            }
        }
    kvant_cache_free(&cache);
}

RUN_CASES(NULL, NULL)
