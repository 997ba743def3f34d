/* test_export.c - an exported block of a cache holds the sequence's tokens and no other row,
 * whatever the block held before. Equal tokens give equal bytes. */
#include "testing.h"

#include <kvant/cache.h>

#include "../../src/base/fnv.h"

enum {
    LAYERS = 2,
    KV_HEADS = 2,
    DIM = 32,
    WIDTH = KV_HEADS * DIM,
    MOST = 1024,
    FORM = 72 /* of the first record's first block, if its transform has no numbers */
};
enum { OWN, OTHER, THIRD }; /* texts */

typedef struct example {
    const char *k, *v;
    bool
        learns; /* centres and scales come from the first 64 rows, which are the same in all ways */
    bool windows;            /* the newest rows are fp16 */
    bool groups, key_groups; /* tokens share scales */
} example;

/* Pairs besides all_specs: the presets' codecs without a calibration, windows, and keys and values
 * of different codecs. */
static const char *const pairs[][2] = {
    { "turboquant-6:transform=first", "trellis-4:center=first" },
    { "trellis-4:transform=first", "trellis-4" },
    { "trellis-3:transform=first", "trellis-3" },
    { "trellis-2:transform=first", "trellis-2:transform=first" },
    { "turboquant-4:center=first,norm=first", "int-4:center=first" },
    { "turboquant-4:recent=64", "turboquant-4:recent=64" },
    { "trellis-3:sink=4,recent=20", "int-2:axis=channel" },
    { "int-4:axis=channel", "f16" },
};
enum { EXAMPLES = COUNT(pairs) + COUNT(all_specs) };

static example example_of(size_t i)
{
    example e = { i < COUNT(pairs) ? pairs[i][0] : all_specs[i - COUNT(pairs)],
                  i < COUNT(pairs) ? pairs[i][1] : all_specs[i - COUNT(pairs)],
                  false,
                  false,
                  false,
                  false };
    for (int role = 0; role < 2; role++) {
        kvant_codec *codec = make_codec(role ? e.v : e.k, DIM, (kvant_role)role);
        const kvant_codec_info info = info_of(codec);
        e.learns |= info.center == KVANT_CENTER_FIRST || info.norm == KVANT_NORM_FIRST;
        e.groups |= info.block_tokens > 1;
        e.key_groups |= role == KVANT_ROLE_K && info.block_tokens > 1;
        e.windows |= info.block_tokens > 1 || info.recent_tokens;
        kvant_codec_free(&codec);
    }
    return e;
}

/* The row of a token, which is the same in every cache. */
static void fill_rows(float *rows, int text, uint32_t layer, int role, uint32_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t rng = 1 + (uint64_t)text + 10u * layer + 100u * (uint64_t)role +
                       1000u * (uint64_t)(first + i);
        for (int j = 0; j < 8; j++)
            test_random(&rng);
        fill_normal(rows + (size_t)i * WIDTH, WIDTH, &rng);
    }
}

/* bad: index of a row of the last layer's values that holds a NaN, so that the call is refused; or
 * -1. */
static void append_part(kvant_cache *cache, int32_t s, int text, uint32_t first, uint32_t n,
                        int32_t bad)
{
    float *k = malloc((size_t)n * WIDTH * sizeof *k), *v = malloc((size_t)n * WIDTH * sizeof *v);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        fill_rows(k, text, layer, 0, first, n);
        fill_rows(v, text, layer, 1, first, n);
        if (bad >= 0)
            v[bad * WIDTH] = NAN;
        assert_int_equal(kvant_cache_append(cache, layer, s, k, v, n),
                         bad >= 0 ? KVANT_ERR_NONFINITE : KVANT_OK);
    }
    free(k);
    free(v);
}

/* Appends tokens first to end - 1 of a text. The first 64 come in one call, because learning
 * depends on the calls. */
static void append(kvant_cache *cache, int32_t s, int text, uint32_t first, uint32_t end)
{
    for (uint32_t next; first < end; first = next) {
        next = first == 0 && end > 64 ? 64 : end;
        append_part(cache, s, text, first, next - first, -1);
    }
}

static kvant_cache *make(const example *e)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.n_layers = LAYERS, params.n_heads = params.n_kv_heads = KV_HEADS, params.head_dim = DIM;
    params.max_tokens = MOST, params.max_sequences = 4, params.n_threads = 2;
    params.k = e->k, params.v = e->v;
    kvant_cache *cache;
    if (kvant_cache_create(&params, &cache) != KVANT_OK)
        fail_msg("%s: %s", e->k, kvant_error_message());
    return cache;
}

typedef struct bytes {
    uint8_t *data;
    size_t n;
} bytes;

static bytes export_blocks(kvant_cache *cache, int32_t s, uint32_t first, uint32_t n)
{
    bytes b = { NULL, 0 };
    assert_int_equal(kvant_sequence_export_size(cache, s, first, n, &b.n), KVANT_OK);
    b.data = malloc(b.n);
    if (kvant_sequence_export(cache, s, first, n, b.data, b.n) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    return b;
}

static bytes export_block(kvant_cache *cache, int32_t s, uint32_t index)
{
    return export_blocks(cache, s, index, 1);
}

/* Frees both. */
static void assert_same_bytes(bytes a, bytes b)
{
    assert_int_equal(a.n, b.n);
    assert_memory_equal(a.data, b.data, a.n);
    free(a.data);
    free(b.data);
}

/* Every tensor's block has the first n slots and no other: importing compares the slots. */
static void check_written(const example *e, const bytes *b, uint32_t n)
{
    kvant_cache *cache = make(e);
    const int32_t s = kvant_sequence_create(cache);
    uint64_t count;
    memcpy(&count, b->data, sizeof count);
    assert_int_equal(count, n);
    if (kvant_sequence_import(cache, s, b->data, b->n) != KVANT_OK)
        fail_msg("%s: %s", e->k, kvant_error_message());
    assert_int_equal(kvant_sequence_length(cache, s, LAYERS - 1), n);
    kvant_cache_free(&cache);
}

/* A way to fill a sequence with the first n tokens of OWN, in a block that held other tokens
 * before. */
typedef int32_t way(kvant_cache *cache, uint32_t n, uint32_t most);

static int32_t cleanly(kvant_cache *cache, uint32_t n, uint32_t most)
{
    int32_t s = kvant_sequence_create(cache);
    append(cache, s, OWN, 0, n);
    return s;
}

static int32_t longer(kvant_cache *cache, int text, uint32_t n, uint32_t most)
{
    int32_t s = cleanly(cache, n, most);
    append(cache, s, text, n, most);
    return s;
}

static int32_t cut(kvant_cache *cache, uint32_t n, uint32_t most)
{
    int32_t s = longer(cache, OTHER, n, most);
    assert_int_equal(kvant_sequence_truncate(cache, s, n), KVANT_OK);
    return s;
}

static int32_t cut_third(kvant_cache *cache, uint32_t n, uint32_t most)
{
    int32_t s = longer(cache, THIRD, n, most);
    assert_int_equal(kvant_sequence_truncate(cache, s, n), KVANT_OK);
    return s;
}

static int32_t cut_twice(kvant_cache *cache, uint32_t n, uint32_t most)
{
    int32_t s = cut(cache, n - 4, most);
    append(cache, s, OTHER, n - 4, n + 2);
    assert_int_equal(kvant_sequence_truncate(cache, s, n - 4), KVANT_OK);
    append(cache, s, OWN, n - 4, n);
    return s;
}

static int32_t forked(kvant_cache *cache, uint32_t n, uint32_t most)
{
    int32_t s = longer(cache, OTHER, n, most), fork = kvant_sequence_fork(cache, s);
    assert_int_equal(kvant_sequence_truncate(cache, fork, n), KVANT_OK);
    return fork;
}

static int32_t left_alone(kvant_cache *cache, uint32_t n, uint32_t most)
{
    int32_t s = longer(cache, OTHER, n, most), fork = kvant_sequence_fork(cache, s);
    assert_int_equal(kvant_sequence_truncate(cache, fork, n), KVANT_OK);
    kvant_sequence_free(cache, s);
    return fork;
}

/* The fork writes to the shared block, which the cache copies then. */
static int32_t forked_and_grown(kvant_cache *cache, uint32_t n, uint32_t most)
{
    int32_t s = longer(cache, OTHER, n - 3, most), fork = kvant_sequence_fork(cache, s);
    assert_int_equal(kvant_sequence_truncate(cache, fork, n - 3), KVANT_OK);
    append(cache, fork, OWN, n - 3, n);
    return fork;
}

static int32_t alone_and_grown(kvant_cache *cache, uint32_t n, uint32_t most)
{
    int32_t fork = left_alone(cache, n - 3, most);
    append(cache, fork, OWN, n - 3, n);
    return fork;
}

/* The cache writes rows in parts of 512, and the last part is refused. */
static int32_t refused(kvant_cache *cache, uint32_t n, uint32_t most)
{
    int32_t s = cleanly(cache, n, n);
    append_part(cache, s, OTHER, n, 600, 590);
    assert_int_equal(kvant_sequence_length(cache, s, 0), n);
    return s;
}

/* Block by block, or all blocks at once. */
static int32_t imported(kvant_cache *cache, uint32_t n, bool at_once)
{
    const uint32_t n_blocks = (n + 63) / 64, step = at_once ? n_blocks : 1;
    int32_t from = cleanly(cache, n, n), s = kvant_sequence_create(cache);
    for (uint32_t index = 0; index < n_blocks; index += step) {
        bytes b = export_blocks(cache, from, index, step);
        assert_int_equal(kvant_sequence_import(cache, s, b.data, b.n), KVANT_OK);
        free(b.data);
    }
    assert_int_equal(kvant_sequence_length(cache, s, 0), n);
    return s;
}

static int32_t imported_by_block(kvant_cache *cache, uint32_t n, uint32_t most)
{
    return imported(cache, n, false);
}

static int32_t imported_at_once(kvant_cache *cache, uint32_t n, uint32_t most)
{
    return imported(cache, n, true);
}

/* The last block of n tokens, which held rows up to token `most`. */
static bytes export_by(const example *e, way *by, uint32_t n, uint32_t most)
{
    kvant_cache *cache = make(e);
    const int32_t s = by(cache, n, most);
    bytes b = export_block(cache, s, (n - 1) / 64);
    check_written(e, &b, n - (n - 1) / 64 * 64);
    kvant_cache_free(&cache);
    return b;
}

static void check_same(const example *e, way *one, way *two, uint32_t n, uint32_t most,
                       const char *what)
{
    bytes a = export_by(e, one, n, most), b = export_by(e, two, n, most);
    if (a.n != b.n || memcmp(a.data, b.data, a.n) != 0)
        fail_msg("%s, %s: %u of %u tokens, %s: other bytes", e->k, e->v, n, most, what);
    free(a.data);
    free(b.data);
}

CASE(equal_tokens_give_equal_bytes)
{
    static const struct {
        const char *name;
        way *by;
    } ways[] = { { "cut", cut },
                 { "forked", forked },
                 { "left alone and grown", alone_and_grown },
                 { "cut twice", cut_twice },
                 { "left alone", left_alone },
                 { "forked and grown", forked_and_grown } };
    for (size_t i = 0; i < EXAMPLES; i++)
        for (size_t w = 0; w < (i < COUNT(pairs) ? COUNT(ways) : 3); w++) {
            const example e = example_of(i);
            check_same(&e, cleanly, ways[w].by, 100, 127, ways[w].name);
            if (!e.learns)
                check_same(&e, cleanly, ways[w].by, 10, 50, ways[w].name);
            if (!e.learns && !e.windows) /* blocks are sealed, and there is more than one */
                check_same(&e, cleanly, ways[w].by, 70, 200, ways[w].name);
        }
}

CASE(refused_rows_are_not_exported)
{
    for (size_t i = 0; i < EXAMPLES; i += 3) {
        const example e = example_of(i);
        if (!e.learns && !e.windows)
            check_same(&e, cleanly, refused, 70, 70, "refused");
    }
}

CASE(imported_blocks_are_exported_alike)
{
    for (size_t i = 0; i < EXAMPLES; i++) {
        const example e = example_of(i);
        check_same(&e, cleanly, imported_by_block, 170, 170, "imported by block");
        check_same(&e, cleanly, imported_at_once, 170, 170, "imported at once");
    }
}

/* The count of tokens stands before the records, and no checksum covers it. */
CASE(other_counts_are_refused)
{
    static const uint64_t counts[] = { 0,   1,   169, 171,  128,        192,
                                       193, 256, 234, 1024, UINT32_MAX, UINT64_MAX };
    const example e = example_of(0);
    kvant_cache *cache = make(&e);
    const int32_t from = cleanly(cache, 170, 170), s = kvant_sequence_create(cache);
    bytes b = export_blocks(cache, from, 0, 3);
    kvant_cache_info before = { .size = sizeof before }, after = before;
    kvant_cache_get_info(cache, &before);
    for (size_t i = 0; i < COUNT(counts); i++) {
        memcpy(b.data, &counts[i], sizeof counts[i]);
        const kvant_status status = kvant_sequence_import(cache, s, b.data, b.n);
        assert_true(status == KVANT_ERR_FORMAT || status == KVANT_ERR_FULL);
        assert_int_equal(kvant_sequence_length(cache, s, 0), 0);
    }
    kvant_cache_get_info(cache, &after);
    assert_int_equal(before.n_free_blocks, after.n_free_blocks);
    free(b.data);
    kvant_cache_free(&cache);
}

/* A damaged export of another text: later rows do not get its transforms. */
CASE(damaged_blocks_leave_nothing)
{
    for (size_t i = 0; i < COUNT(pairs); i++) {
        const example e = example_of(i);
        kvant_cache *cache = make(&e), *other = make(&e), *clean = make(&e);
        const int32_t from = kvant_sequence_create(other), s = kvant_sequence_create(cache);
        append(other, from, OTHER, 0, 170);
        bytes b = export_blocks(other, from, 0, 3);
        b.data[b.n - 1] ^= 1;
        assert_int_equal(kvant_sequence_import(cache, s, b.data, b.n), KVANT_ERR_FORMAT);
        append(cache, s, OWN, 0, 300);
        bytes one = export_blocks(cache, s, 0, 5),
              two = export_blocks(clean, cleanly(clean, 300, 300), 0, 5);
        assert_same_bytes(one, two);
        free(b.data);
        kvant_cache_free(&cache);
        kvant_cache_free(&other);
        kvant_cache_free(&clean);
    }
}

/* A refused append leaves no token, so blocks can be imported afterwards. */
CASE(blocks_follow_refused_rows)
{
    const example e = { .k = "int-4", .v = "int-4" };
    kvant_cache *cache = make(&e);
    const int32_t from = cleanly(cache, 170, 170), s = kvant_sequence_create(cache);
    bytes b = export_blocks(cache, from, 0, 3);
    append_part(cache, s, OTHER, 0, 600, 590);
    assert_int_equal(kvant_sequence_import(cache, s, b.data, b.n), KVANT_OK);
    assert_same_bytes(export_blocks(cache, s, 0, 3), b);
    kvant_cache_free(&cache);
}

/* Sets the age of the first block of the first record, whose transform has no numbers. */
static void lie_about_age(const bytes *b)
{
    const uint32_t age = UINT32_MAX;
    uint64_t n, sum;
    memcpy(&n, b->data + 8, sizeof n);
    memcpy(b->data + FORM + 12, &age, sizeof age);
    sum = kvant_checksum_of(b->data + 16, (size_t)n - sizeof sum);
    memcpy(b->data + 16 + n - sizeof sum, &sum, sizeof sum);
}

/* A record can claim that its rows are older than any row can be. Rows that are stored after them
 * still leave the window in time. */
CASE(ages_that_lie_do_no_harm)
{
    const example e = { .k = "turboquant-4:recent=64", .v = "turboquant-4:recent=64" };
    kvant_cache *cache = make(&e);
    const int32_t from = cleanly(cache, 10, 10), s = kvant_sequence_create(cache);
    bytes b = export_block(cache, from, 0);
    lie_about_age(&b);
    assert_int_equal(kvant_sequence_import(cache, s, b.data, b.n), KVANT_OK);
    assert_int_equal(kvant_sequence_truncate(cache, s, 0), KVANT_OK);
    append(cache, from, OWN, 10, 300);
    append(cache, s, OWN, 0, 10);
    append(cache, s, OWN, 10, 300);
    bytes one = export_blocks(cache, from, 0, 5), two = export_blocks(cache, s, 0, 5);
    assert_same_bytes(one, two);
    free(b.data);
    kvant_cache_free(&cache);
}

static kvant_status size_of(kvant_cache *cache, int32_t s, uint32_t first, uint32_t n)
{
    size_t most;
    return kvant_sequence_export_size(cache, s, first, n, &most);
}

/* The blocks of a window that moved on: a new sequence begins after the same dropped blocks. */
CASE(dropped_blocks_stay_dropped)
{
    const example e = example_of(COUNT(pairs) - 1);
    kvant_cache *cache = make(&e);
    const int32_t from = cleanly(cache, 250, 250), s = kvant_sequence_create(cache);
    assert_int_equal(kvant_sequence_drop(cache, from, 130), KVANT_OK);
    assert_int_equal(size_of(cache, from, 0, 4), KVANT_ERR_ARGUMENT);
    assert_int_equal(size_of(cache, from, 1, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(size_of(cache, from, 2, 3), KVANT_ERR_ARGUMENT);
    assert_int_equal(size_of(cache, from, 2, 0), KVANT_ERR_ARGUMENT);
    assert_int_equal(size_of(cache, from, 2, UINT32_MAX), KVANT_ERR_ARGUMENT);
    bytes b = export_blocks(cache, from, 2, 2);
    assert_int_equal(kvant_sequence_drop(cache, s, MOST + 64), KVANT_ERR_FULL);
    assert_int_equal(kvant_sequence_drop(cache, s, 130), KVANT_OK);
    assert_int_equal(kvant_sequence_import(cache, s, b.data, b.n), KVANT_OK);
    assert_int_equal(kvant_sequence_length(cache, s, 0), 250);
    assert_same_bytes(export_blocks(cache, s, 2, 2), b);
    append(cache, from, OTHER, 250, 300);
    append(cache, s, OTHER, 250, 300);
    bytes one = export_blocks(cache, from, 2, 3), two = export_blocks(cache, s, 2, 3);
    assert_same_bytes(one, two);
    kvant_cache_free(&cache);
}

/* Matrices take many bytes, and blocks that are exported together share them. */
CASE(blocks_together_take_less)
{
    const example e = example_of(0);
    kvant_cache *cache = make(&e);
    const int32_t s = cleanly(cache, 640, 640);
    bytes all = export_blocks(cache, s, 0, 10);
    size_t single = 0;
    for (uint32_t i = 0; i < 10; i++) {
        bytes b = export_block(cache, s, i);
        single += b.n;
        free(b.data);
    }
    assert_true(all.n < single);
    free(all.data);
    kvant_cache_free(&cache);
}

/* Rows of a window are quantised when they leave it. The rows that stay in a sealed block do
 * not depend on rows that were cut, except where they gave scales. */
CASE(sealed_rows_do_not_depend_on_others)
{
    for (size_t i = 0; i < EXAMPLES; i++) {
        const example e = example_of(i);
        if (e.windows && !e.groups && !e.learns)
            check_same(&e, cut_third, cut, 70, 300, "of another text");
    }
}

/* Two ways to store n rows of one kv head as fp16 must agree. A rotated number errs by 2^-11 of
 * itself, so a row errs by 2^-11 of its length, and the rotation back keeps lengths. The term 2^-18
 * covers sums in binary32. */
static void check_near(const float *one, const float *two, size_t n)
{
    static const float zeros[DIM];
    for (size_t i = 0; i < n; i++, one += DIM, two += DIM) {
        const double length = sqrt(squared_distance(one, zeros, DIM));
        const double error = sqrt(squared_distance(one, two, DIM));
        if (!(error <= length * (0x1p-11 + 0x1p-18)))
            fail_msg("row %zu of length %g is off by %g", i, length, error);
    }
}

/* The block of n tokens is imported into another cache and reads there as in the first. Rows are
 * near OWN. */
static void check_reads(kvant_cache *cache, int32_t s, uint32_t n, kvant_cache *into)
{
    static float rows[2][2][64 * WIDTH];
    const int32_t t = kvant_sequence_create(into);
    bytes b = export_block(cache, s, 0);
    assert_int_equal(kvant_sequence_import(into, t, b.data, b.n), KVANT_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(kvant_cache_read(cache, layer, s, 0, n, rows[0][0], rows[0][1]), KVANT_OK);
        assert_int_equal(kvant_cache_read(into, layer, t, 0, n, rows[1][0], rows[1][1]), KVANT_OK);
        for (int role = 0; role < 2; role++)
            check_near(rows[0][role], rows[1][role], n * KV_HEADS);
    }
    free(b.data);
    kvant_sequence_free(into, t);
}

/* Groups that were sealed together with rows that are cut later: the rows that stay are exported as
 * fp16, without the scales. */
CASE(cut_groups_move_as_rows)
{
    static way *const ways[] = { cut, forked, left_alone, alone_and_grown };
    for (size_t i = 0; i < EXAMPLES; i++)
        for (size_t w = 0; w < COUNT(ways); w++) {
            const example e = example_of(i);
            if (!e.groups || e.learns)
                continue;
            kvant_cache *cache = make(&e), *other = make(&e);
            const int32_t s = ways[w](cache, 10, 300);
            bytes b = export_block(cache, s, 0);
            uint32_t open;
            check_written(&e, &b, 10);
            memcpy(&open, b.data + FORM, sizeof open);
            if (e.key_groups && open != 1)
                fail_msg("%s, %s: sealed", e.k, e.v);
            check_reads(cache, s, 10, other);
            free(b.data);
            kvant_cache_free(&cache);
            kvant_cache_free(&other);
        }
}

RUN_CASES(NULL, NULL)
