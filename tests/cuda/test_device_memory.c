/* test_device_memory.c - a cache on the mock device (host/host.h) when the device runs out of
 * memory, and steps of sequences that have tokens in different layers. A call fails, and the cache
 * continues as if the call had not been made. */
#include <dlfcn.h>

#include "../unit/testing.h"
#include "host/host.h"

#include <kvant/cache.h>

enum { LAYERS = 2, HEADS = 4, KV_HEADS = 2, DIM = 64, WIDTH = KV_HEADS * DIM };
enum { Q_WIDTH = HEADS * DIM, BATCH = 2, TOKENS = 100, MOST_FAILURES = 400 };

static host_control *control;

static const char *const pairs[][2] = { { "turboquant-4", "turboquant-4" },
                                        { "trellis-4", "trellis-3" },
                                        { "turboquant-6:center=first,norm=first", "trellis-4" },
                                        { "turboquant-4:rotate=dense", "int-4:axis=channel" } };

static kvant_status make(size_t pair, kvant_cache **cache)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS;
    params.head_dim = DIM, params.max_tokens = 512, params.max_sequences = BATCH;
    params.n_threads = 1, params.device = "cuda";
    params.k = pairs[pair][0], params.v = pairs[pair][1];
    return kvant_cache_create(&params, cache);
}

static void check(kvant_status status, kvant_status wanted)
{
    if (status != wanted)
        fail_msg("status %d: %s", (int)status, kvant_error_message());
}

static void append(kvant_cache *cache, uint32_t layer, int32_t s, uint32_t n)
{
    static float k[TOKENS * WIDTH], v[TOKENS * WIDTH];
    uint64_t rng = 3 + layer + 10 * (uint64_t)s;
    fill_normal(k, COUNT(k), &rng);
    fill_normal(v, COUNT(v), &rng);
    check(kvant_cache_append(cache, layer, s, k, v, n), KVANT_OK);
}

static kvant_cache *make_filled(size_t pair)
{
    kvant_cache *cache;
    check(make(pair, &cache), KVANT_OK);
    for (int32_t s = 0; s < BATCH; s++) {
        assert_int_equal(kvant_sequence_create(cache), s);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            append(cache, layer, s, TOKENS - 10 * (uint32_t)s);
    }
    return cache;
}

/* Appends a token to every layer and runs attention. */
static kvant_status take_step(kvant_cache *cache, float out[LAYERS][BATCH * Q_WIDTH])
{
    static float q[BATCH * Q_WIDTH], k[BATCH * WIDTH], v[BATCH * WIDTH];
    uint64_t rng = 77;
    fill_normal(q, COUNT(q), &rng);
    fill_normal(k, COUNT(k), &rng);
    fill_normal(v, COUNT(v), &rng);
    kvant_status status = kvant_steps_next(cache);
    for (uint32_t layer = 0; layer < LAYERS && status == KVANT_OK; layer++) {
        const kvant_step step = { .size = sizeof step, .q = q, .k = k, .v = v, .out = out[layer] };
        status = kvant_cache_step(cache, layer, &step);
    }
    return status;
}

static kvant_status begin(kvant_cache *cache)
{
    static const int32_t sequences[BATCH] = { 0, 1 };
    kvant_steps_info info = { .size = sizeof info };
    return kvant_steps_begin(cache, sequences, BATCH, &info);
}

static kvant_status attend(kvant_cache *cache, float out[LAYERS][BATCH * Q_WIDTH])
{
    static const int32_t sequences[BATCH] = { 0, 1 };
    static float q[BATCH * Q_WIDTH];
    uint64_t rng = 78;
    fill_normal(q, COUNT(q), &rng);
    kvant_status status = KVANT_OK;
    for (uint32_t layer = 0; layer < LAYERS && status == KVANT_OK; layer++)
        status = kvant_cache_attend_batch(cache, layer, sequences, BATCH, q, out[layer], 1);
    return status;
}

/* Steps that are repeated after a failure give the same numbers as in a cache without failures. */
CASE(steps_begin_again)
{
    static float want[LAYERS][BATCH * Q_WIDTH], got[LAYERS][BATCH * Q_WIDTH];
    for (size_t pair = 0; pair < COUNT(pairs); pair++) {
        kvant_cache *cache = make_filled(pair);
        check(begin(cache), KVANT_OK);
        check(take_step(cache, want), KVANT_OK);
        kvant_cache_free(&cache);
        for (uint32_t failing = 1, failed = true; failed; failing++) {
            assert_true(failing < MOST_FAILURES);
            cache = make_filled(pair);
            control->no_memory = failing;
            const kvant_status status = begin(cache);
            failed = control->no_memory == 0;
            control->no_memory = 0;
            check(status, failed ? KVANT_ERR_MEMORY : KVANT_OK);
            if (failed) {
                check(kvant_steps_next(cache), KVANT_ERR_ARGUMENT);
                check(begin(cache), KVANT_OK);
            }
            check(take_step(cache, got), KVANT_OK);
            assert_memory_equal(got, want, sizeof want);
            kvant_cache_free(&cache);
        }
    }
}

CASE(attention_is_computed_again)
{
    static float want[LAYERS][BATCH * Q_WIDTH], got[LAYERS][BATCH * Q_WIDTH];
    for (size_t pair = 0; pair < COUNT(pairs); pair++) {
        kvant_cache *cache = make_filled(pair);
        check(attend(cache, want), KVANT_OK);
        kvant_cache_free(&cache);
        for (uint32_t failing = 1, failed = true; failed; failing++) {
            assert_true(failing < MOST_FAILURES);
            cache = make_filled(pair);
            control->no_memory = failing;
            const kvant_status status = attend(cache, got);
            failed = control->no_memory == 0;
            control->no_memory = 0;
            check(status, failed ? KVANT_ERR_MEMORY : KVANT_OK);
            check(attend(cache, got), KVANT_OK);
            assert_memory_equal(got, want, sizeof want);
            kvant_cache_free(&cache);
        }
    }
}

CASE(caches_are_not_made)
{
    for (size_t pair = 0; pair < COUNT(pairs); pair++)
        for (uint32_t failing = 1, failed = true; failed; failing++) {
            kvant_cache *cache;
            assert_true(failing < MOST_FAILURES);
            control->no_memory = failing;
            const kvant_status status = make(pair, &cache);
            failed = control->no_memory == 0;
            control->no_memory = 0;
            check(status, failed ? KVANT_ERR_MEMORY : KVANT_OK);
            assert_int_equal(cache == NULL, failed);
            kvant_cache_free(&cache);
        }
}

/* The second sequence has tokens only in some layers, the first or the last, in either order. */
CASE(layers_have_all_sequences)
{
    for (int32_t full = 0; full < BATCH; full++)
        for (uint32_t only = 0; only < LAYERS; only++) {
            kvant_cache *cache;
            check(make(0, &cache), KVANT_OK);
            assert_int_equal(kvant_sequence_create(cache), 0);
            assert_int_equal(kvant_sequence_create(cache), 1);
            for (uint32_t layer = 0; layer < LAYERS; layer++)
                append(cache, layer, full, TOKENS);
            append(cache, only, !full, TOKENS);
            check(begin(cache), KVANT_ERR_UNSUPPORTED);
            assert_non_null(strstr(kvant_error_message(), "some of the sequences"));
            check(kvant_steps_next(cache), KVANT_ERR_ARGUMENT);
            append(cache, !only, !full, TOKENS);
            check(begin(cache), KVANT_OK);
            kvant_cache_free(&cache);
        }
}

int main(int argc, char **argv)
{
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    void *symbol = library ? dlsym(library, HOST_CONTROL_FUNCTION) : NULL;
    host_control_fn *get = NULL;
    memcpy(&get, &symbol,
           sizeof get); /* ISO C has no conversion from void * to a function pointer */
    control = get ? get() : NULL;
    if (!control) {
        fprintf(stderr, "usage: test_device_memory LIBRARY\n");
        return 2;
    }
    return run_cases(NULL, NULL);
}
