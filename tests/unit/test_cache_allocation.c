/* test_cache_allocation.c - the life of a cache of sequences with one allocation that fails, for
 * each allocation once, and then with all allocations from it on. The header refused.h says what a
 * call must do then. test_allocation_failure.c tests layers, files and threads.
 *
 *     test_cache_allocation [LIBRARY]
 *
 * LIBRARY: the mock of a GPU (cuda/host/host.h). Then the cache lies there, and allocations on the
 * device fail, too. */
#include <dlfcn.h>

#include "../cuda/host/host.h"
#include "refused.h"

#include <kvant/cache.h>

enum { DIM = 64, HEADS = 2, TOKENS = 200, WIDTH = HEADS * DIM };

static float rows[TOKENS * WIDTH];
/* Keys and values that learn matrices, or only centres and scales; NULL: the default preset. */
static const char *const specs[][2] = { { NULL, NULL },
                                        { "turboquant-4:center=first,norm=first",
                                          "turboquant-4:center=first,norm=first" },
                                        { "trellis-4:transform=first", "trellis-4" } };
static size_t spec;           /* of the cache */
static host_control *control; /* of the mock device; NULL: the cache is in the computer's memory */

static void fill_rows(void)
{
    uint64_t rng = 31;
    fill_normal(rows, COUNT(rows), &rng);
}

enum { LAYERS = 2, STEP = 40 };

/* The objects of a cache's life that its calls work on. */
typedef struct life {
    kvant_cache *cache;
    int32_t first, second; /* sequences */
    float out[WIDTH];
} life;

typedef kvant_status step(life *l);

static kvant_status create_cache(life *l)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = HEADS,
    params.head_dim = DIM;
    params.max_tokens = 512, params.max_sequences = 2, params.n_threads = control ? 1 : 2;
    params.device = control ? "cuda" : NULL;
    params.k = specs[spec][0], params.v = specs[spec][1];
    const kvant_status status = kvant_cache_create(&params, &l->cache);
    if (status != KVANT_OK) {
        assert_null(l->cache);
        assert_int_not_equal(kvant_error_message()[0], 0);
    }
    return status;
}

static kvant_status create_sequence(life *l)
{
    l->first = kvant_sequence_create(l->cache);
    return l->first >= 0 ? KVANT_OK : KVANT_ERR_MEMORY;
}

static kvant_status tell_rope(life *l)
{
    static const float frequencies[DIM / 2] = { 1, 0.1f, 0.01f };
    const kvant_rope rope = { .size = sizeof rope, .n_dims = DIM, .frequencies = frequencies };
    return kvant_cache_set_rope(l->cache, 0, &rope);
}

static kvant_status note_queries(life *l)
{
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = rows,
                                    .token_stride = WIDTH,
                                    .head_stride = DIM,
                                    .n_tokens = STEP,
                                    .n_heads = HEADS };
    return kvant_cache_note_queries(l->cache, 0, &queries);
}

static kvant_status fork_sequence(life *l)
{
    l->second = kvant_sequence_fork(l->cache, l->first);
    return l->second >= 0 ? KVANT_OK : KVANT_ERR_MEMORY;
}

static kvant_status append_to(life *l, int32_t sequence, uint32_t number)
{
    const uint32_t length = kvant_sequence_length(l->cache, sequence, number);
    const float *row = rows + (size_t)length * WIDTH;
    const kvant_status status = kvant_cache_append(l->cache, number, sequence, row, row, STEP);
    assert_int_equal(kvant_sequence_length(l->cache, sequence, number),
                     length + (status == KVANT_OK ? STEP : 0));
    return status;
}

static kvant_status append_0(life *l)
{
    return append_to(l, l->first, 0);
}

static kvant_status append_1(life *l)
{
    return append_to(l, l->first, 1);
}

/* Writes into blocks that both sequences share, so the cache copies them. */
static kvant_status append_second(life *l)
{
    return append_to(l, l->second, 0);
}

static kvant_status truncate_second(life *l)
{
    return kvant_sequence_truncate(l->cache, l->second, 70);
}

static kvant_status attend_first(life *l)
{
    return kvant_cache_attend(l->cache, 0, l->first, rows, l->out, 1);
}

typedef struct exported {
    uint8_t data[1 << 18];
    size_t bytes;
} exported;

static kvant_status export_first(life *l, exported *e)
{
    const kvant_status status = kvant_sequence_export_size(l->cache, l->first, 0, 2, &e->bytes);
    if (status != KVANT_OK)
        return status;
    assert_in_range(e->bytes, 1, sizeof e->data);
    return kvant_sequence_export(l->cache, l->first, 0, 2, e->data, e->bytes);
}

/* The sequence stays empty if blocks cannot be appended to it. */
static kvant_status import_to(life *l, int32_t sequence, const exported *e)
{
    const kvant_status status = kvant_sequence_import(l->cache, sequence, e->data, e->bytes);
    assert_int_equal(kvant_sequence_length(l->cache, sequence, LAYERS - 1),
                     status == KVANT_OK ? 2 * STEP : 0);
    return status;
}

static kvant_status move_first(life *l)
{
    static exported e;
    const int32_t to = kvant_sequence_create(l->cache);
    kvant_status status = export_first(l, &e);
    if (status == KVANT_OK)
        status = import_to(l, to, &e);
    kvant_sequence_free(l->cache, to);
    return status;
}

static step *const steps[] = { create_cache,    create_sequence, tell_rope,     note_queries,
                               append_0,        append_1,        append_0,      append_1,
                               attend_first,    move_first,      fork_sequence, append_second,
                               truncate_second, append_0,        append_second, attend_first };

/* Stops at the first call that fails. */
static kvant_status live(const void *context)
{
    life l = { 0 };
    kvant_status status = KVANT_OK;
    for (size_t i = 0; i < COUNT(steps) && status == KVANT_OK; i++)
        status = steps[i](&l);
    kvant_cache_free(&l.cache);
    return status;
}

CASE(caches)
{
    refuse_each_allocation(live, NULL, "a cache",
                           true); /* a spec is tried with several head dimensions */
}

/* Refuses allocations of one call: in the computer's memory the at-th and all later ones, or on the
 * device the at-th one. Returns how many were refused. */
static long refuse_in(step *call, life *l, long at, bool on_device, kvant_status *status)
{
    if (on_device)
        control->no_memory = (uint32_t)at;
    else
        arm(at, true);
    *status = call(l);
    const long n = !on_device ? refused : at && control->no_memory == 0;
    arm(0, false);
    if (control)
        control->no_memory = 0;
    return n;
}

/* A call that failed for lack of memory is repeated and succeeds; the final output is the same. So
 * no row that an earlier call accepted is lost. */
static long live_on(long at, bool on_device, float *out)
{
    life l = { 0 };
    long met = 0;
    for (size_t i = 0; i < COUNT(steps); i++) {
        kvant_status status;
        met += refuse_in(steps[i], &l, at, on_device, &status);
        assert_int_equal(status, status == KVANT_OK ? KVANT_OK : KVANT_ERR_MEMORY);
        if (status != KVANT_OK)
            assert_int_equal(steps[i](&l), KVANT_OK);
    }
    memcpy(out, l.out, sizeof l.out);
    kvant_cache_free(&l.cache);
    return met;
}

static void go_on(bool on_device)
{
    float want[WIDTH], got[WIDTH];
    live_on(0, on_device, want);
    const long before = blocks;
    long n = 0;
    for (long at = 1; live_on(at, on_device, got); at++, n++) {
        assert_memory_equal(got, want, sizeof got);
        assert_int_equal(blocks, before);
    }
    assert_true(n > 0);
}

CASE(caches_go_on)
{
    for (spec = 0; spec < COUNT(specs); spec++)
        go_on(false);
    spec = 0;
}

CASE(caches_go_on_without_device_memory)
{
    for (spec = 0; spec < COUNT(specs) && control; spec++)
        go_on(true);
    spec = 0;
}

/* A new cache, which gets the transforms of the blocks, too. */
static kvant_status arrive(const void *context)
{
    life l = { 0 };
    kvant_cache_info before = { .size = sizeof before }, after = before;
    kvant_status status = create_cache(&l);
    if (status == KVANT_OK)
        status = create_sequence(&l);
    if (status == KVANT_OK) {
        kvant_cache_get_info(l.cache, &before);
        status = import_to(&l, l.first, context);
        kvant_sequence_free(l.cache, l.first);
        kvant_cache_get_info(l.cache, &after);
        assert_int_equal(after.n_free_blocks, before.n_free_blocks);
    }
    kvant_cache_free(&l.cache);
    return status;
}

CASE(blocks_arrive)
{
    static exported e;
    life l = { 0 };
    for (size_t i = 0; steps[i] != attend_first; i++)
        assert_int_equal(steps[i](&l), KVANT_OK);
    assert_int_equal(export_first(&l, &e), KVANT_OK);
    kvant_cache_free(&l.cache);
    refuse_each_allocation(arrive, &e, "blocks that are imported", true);
}

static bool find_control(const char *path)
{
    void *library = dlopen(path, RTLD_NOW), *symbol;
    host_control_fn *get = NULL;
    symbol = library ? dlsym(library, HOST_CONTROL_FUNCTION) : NULL;
    memcpy(&get, &symbol, sizeof get); /* ISO C converts no void * to a function */
    control = get ? get() : NULL;
    return control != NULL;
}

int main(int argc, char **argv)
{
    if (argc > 1 && !find_control(argv[1]))
        return 2;
    fill_rows();
    return run_cases(NULL, NULL);
}
