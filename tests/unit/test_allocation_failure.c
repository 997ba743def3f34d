/* test_allocation_failure.c - creates, writes and calibrates with one allocation that fails, for
 * each allocation once, and then with all allocations from it on. Threads that cannot start are
 * tested in the same way. The header refused.h says what a call must do then. Only the functions
 * under "A layer" call the library's interface. test_cache_allocation.c tests caches of
 * sequences. */
#include "refused.h"

#include <kvant/cache.h>
#include <kvant/calibration.h>
#include <kvant/settings.h>
#include <kvant/tensor.h>

#include <errno.h>
#include <pthread.h>
#include <unistd.h>

/* --- Threads --- */

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument);

static bool no_threads;
static long threads_refused;

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument)
{
    if (!no_threads)
        return __real_pthread_create(thread, attributes, start, argument);
    threads_refused++;
    return EAGAIN;
}

/* --- A layer --- */

enum { DIM = 64, HEADS = 2, TOKENS = 200, WIDTH = HEADS * DIM };

typedef struct layer {
    kvant_codec *codecs[2];
    kvant_tensor *tensors[2];
    void *pages[2];
} layer;

static void drop(layer *c)
{
    for (int role = 0; role < 2; role++) {
        kvant_tensor_free(&c->tensors[role]);
        kvant_codec_free(&c->codecs[role]);
        assert_null(c->tensors[role]);
        assert_null(c->codecs[role]);
        free(c->pages[role]);
        c->pages[role] = NULL;
    }
}

/* A failed call leaves NULL where it would have returned an object; the caller frees everything
 * else. */
static kvant_status create_both(layer *c, const char *const specs[2],
                                const kvant_calibration *calibration)
{
    memset(c, 0, sizeof *c);
    for (int role = 0; role < 2; role++) {
        char err[256] = "";
        kvant_status status =
            kvant_codec_create_calibrated(specs[role], DIM, (kvant_role)role, TEST_SEED,
                                          calibration, 0, 0, &c->codecs[role], err, sizeof err);
        if (status != KVANT_OK) {
            assert_null(c->codecs[role]);
            assert_int_not_equal(err[0], 0);
            return status;
        }
        const kvant_codec *const heads[HEADS] = { c->codecs[role], c->codecs[role] };
        const kvant_tensor_params params = { .size = sizeof params,
                                             .codecs = heads,
                                             .n_kv_heads = HEADS,
                                             .n_sequences = 1,
                                             .n_blocks = (TOKENS + 63) / 64 };
        size_t bytes;
        status = kvant_tensor_size(&params, &bytes);
        if (status != KVANT_OK)
            return status;
        c->pages[role] = aligned_alloc(64, bytes);
        if (!c->pages[role])
            return KVANT_ERR_MEMORY;
        memset(c->pages[role], 0, bytes);
        status = kvant_tensor_create(&params, c->pages[role], &c->tensors[role]);
        if (status != KVANT_OK) {
            assert_null(c->tensors[role]);
            return status;
        }
    }
    return KVANT_OK;
}

static kvant_status create(layer *c, const char *spec, const kvant_calibration *calibration)
{
    return create_both(c, (const char *const[]){ spec, spec }, calibration);
}

static kvant_status write_rows(layer *c, int role, uint32_t first, uint32_t n, const float *rows,
                               uint32_t n_threads)
{
    static int64_t slots[TOKENS];
    for (uint32_t i = 0; i < n; i++)
        slots[i] = first + i;
    return kvant_tensor_write(c->tensors[role], slots, n, rows + (size_t)first * WIDTH, WIDTH,
                              n_threads);
}

/* A query of every head over all tokens. */
static kvant_status attend(const layer *c, float *out)
{
    static _Alignas(64) uint8_t workspace[8 << 20];
    static float q[WIDTH];
    size_t bytes;
    for (uint32_t i = 0; i < WIDTH; i++)
        q[i] = (float)(i % 7) - 3;
    const kvant_attention_problem problem = { .size = sizeof problem,
                                              .n_queries = 1,
                                              .n_tokens = TOKENS,
                                              .n_heads = HEADS,
                                              .n_threads = 2,
                                              .q = q,
                                              .q_token_stride = WIDTH,
                                              .q_head_stride = DIM,
                                              .out = out,
                                              .out_token_stride = WIDTH,
                                              .out_head_stride = DIM,
                                              .scale = 0.125f };
    const kvant_status status =
        kvant_attention_workspace(c->tensors[0], c->tensors[1], &problem, &bytes);
    if (status != KVANT_OK)
        return status;
    assert_in_range(bytes, 1, sizeof workspace);
    return kvant_attention(c->tensors[0], c->tensors[1], &problem, workspace, bytes);
}

/* --- The calls --- */

static const char *const plain_specs[] = { "turboquant-4", "trellis-4:center=first,norm=first",
                                           "int-4:axis=channel,group=32,recent=32,sink=4",
                                           PAPERS("octopus-4", "hqmq-s96r4:med3", )
                                               PAPERS("turboquant-3:qjl",
                                                      "turboquant-2.5", ) "int-4:rotate=dense" };
static const char *const file_specs[] = {
    "trellis-4:transform=file", "turboquant-4:transform=file,feedback",
    PAPERS("kmeans-4:c=4", "hessian-4", ) "turboquant-4:center=file,norm=file"
};

static float rows[TOKENS * WIDTH];

static void fill_rows(void)
{
    uint64_t rng = 31;
    fill_normal(rows, COUNT(rows), &rng);
}

/* One kv head and few rows: the calibration has to be quick, because it runs once for each of its
 * allocations. */
static kvant_status calibrate(kvant_calibration **calibration)
{
    static const uint32_t clusters[] = { 4 };
    kvant_calibrator_config config = { .size = sizeof config,
                                       .model = "small",
                                       .seed = 9,
                                       .clusters = clusters,
                                       .n_codebooks = 1,
                                       .sample_rows = 40 };
    kvant_calibrator *calibrator = NULL;
    char err[256] = "";
    *calibration = NULL;
    kvant_status status = kvant_calibrator_create(&config, &calibrator, err, sizeof err);
    if (status != KVANT_OK)
        assert_null(calibrator);
    for (int role = 0; status == KVANT_OK && role < 2; role++)
        status = kvant_calibrator_add_rows(calibrator, 0, (kvant_role)role, 1, DIM, rows, DIM, 100);
    if (status == KVANT_OK)
        status = kvant_calibrator_add_queries(calibrator, 0, 0, DIM, rows, DIM, 100);
    for (uint32_t left = 1; status == KVANT_OK && left;)
        status = kvant_calibrator_cluster(calibrator, &left);
    if (status == KVANT_OK)
        status = kvant_calibrator_finish(calibrator, calibration);
    if (status != KVANT_OK)
        assert_null(*calibration);
    kvant_calibrator_free(&calibrator);
    return status;
}

typedef struct site {
    const char *spec;
    const kvant_calibration *calibration;
} site;

static kvant_status create_and_drop(const void *context)
{
    const site *s = context;
    layer c;
    const kvant_status status = create(&c, s->spec, s->calibration);
    drop(&c);
    return status;
}

static kvant_status calibrate_and_drop(const void *context)
{
    kvant_calibration *calibration;
    const kvant_status status = calibrate(&calibration);
    kvant_calibration_free(&calibration);
    return status;
}

/* Shifts keys and writes further rows. A call that fails leaves all keys where they were. */
static kvant_status shift_and_drop(const void *spec)
{
    static const float frequencies[DIM / 2] = { 1, 0.5f, 0.25f };
    const kvant_rope rope = { .size = sizeof rope, .n_dims = DIM, .frequencies = frequencies };
    static float before[TOKENS * WIDTH], after[TOKENS * WIDTH];
    int32_t by[TOKENS];
    layer c;
    kvant_status status = create(&c, spec, NULL);
    for (uint32_t i = 0; i < TOKENS; i++)
        by[i] = i < 20 ? 0 : -5;
    if (status == KVANT_OK)
        status = write_rows(&c, 0, 0, 150, rows, 1);
    if (status == KVANT_OK) {
        assert_int_equal(kvant_tensor_read(c.tensors[0], 0, 150, before, WIDTH), KVANT_OK);
        status = kvant_tensor_shift(c.tensors[0], &rope, by, TOKENS, 1);
        assert_int_equal(kvant_tensor_read(c.tensors[0], 0, 150, after, WIDTH), KVANT_OK);
        const bool moved = memcmp(before, after, 150 * WIDTH * sizeof *before) != 0;
        assert_int_equal(moved, status == KVANT_OK);
    }
    if (status == KVANT_OK) {
        memcpy(before, after, sizeof before);
        status = write_rows(&c, 0, 150, 20, rows, 1);
        assert_int_equal(kvant_tensor_read(c.tensors[0], 0, 150, after, WIDTH), KVANT_OK);
        if (status != KVANT_OK)
            assert_memory_equal(before, after, 150 * WIDTH * sizeof *before);
    }
    drop(&c);
    return status;
}

static kvant_status load_and_drop(const void *path)
{
    kvant_calibration *calibration;
    char err[256] = "";
    const kvant_status status = kvant_calibration_load(path, &calibration, err, sizeof err);
    if (status != KVANT_OK) {
        assert_null(calibration);
        assert_int_not_equal(err[0], 0);
    }
    kvant_calibration_free(&calibration);
    return status;
}

static kvant_status save_settings(const void *path)
{
    static const char *const heads[] = { "turboquant-4", "turboquant-3" };
    const kvant_settings_layer layers[] = { { .n_kv_heads = 2, .head_dim = DIM, .heads = heads },
                                            { .spec = "int-8", .n_kv_heads = 2, .head_dim = DIM } };
    const kvant_settings_config config = {
        .size = sizeof config, .model = "small", .n_layers = 1, .layers = layers
    };
    kvant_settings *made = NULL, *read = NULL;
    char err[256] = "";
    kvant_status status = kvant_settings_create(&config, &made, err, sizeof err);
    if (status == KVANT_OK)
        status = kvant_settings_save(made, path, err, sizeof err);
    if (status == KVANT_OK)
        status = kvant_settings_load(path, &read, err, sizeof err);
    if (status == KVANT_OK)
        status = kvant_settings_check(read, NULL, err, sizeof err);
    else
        assert_null(read);
    kvant_settings_free(&made);
    kvant_settings_free(&read);
    return status;
}

static const uint32_t batches[][2] = { { 0, 70 }, { 70, 1 }, { 71, TOKENS - 71 } };

/* The output of a layer when no allocation fails. */
static void want_of(const char *spec, float *out)
{
    layer c;
    assert_int_equal(create(&c, spec, NULL), KVANT_OK);
    for (size_t i = 0; i < COUNT(batches); i++)
        for (int role = 0; role < 2; role++)
            assert_int_equal(write_rows(&c, role, batches[i][0], batches[i][1], rows, 2), KVANT_OK);
    assert_int_equal(attend(&c, out), KVANT_OK);
    drop(&c);
}

/* --- Keys and values together --- */

static const char *const both_specs[][2] = {
    { "trellis-2:transform=first", "trellis-2:transform=first" },
    { "turboquant-4:transform=first", "trellis-4:center=first" },
    { "turboquant-4:center=first,norm=first", "trellis-2:transform=first" },
};

static kvant_status write_both(layer *c, uint32_t first, uint32_t n)
{
    static int64_t slots[TOKENS];
    for (uint32_t i = 0; i < n; i++)
        slots[i] = first + i;
    const float *from = rows + (size_t)first * WIDTH;
    return kvant_tensor_write_layer(c->tensors[0], c->tensors[1], slots, n, from, WIDTH, from,
                                    WIDTH, 2);
}

/* Everything that others can see of a tensor. */
static uint8_t *state_of(const kvant_tensor *tensor, size_t *bytes)
{
    const size_t most = kvant_tensor_export_size(tensor), n = (TOKENS + 63) / 64;
    kvant_tensor_info info = { .size = sizeof info };
    assert_int_equal(kvant_tensor_get_info(tensor, &info), KVANT_OK);
    uint8_t *state = calloc(1, sizeof info + n * most);
    *bytes = sizeof info;
    /* working memory is allocated when it is needed, so it may differ */
    info.learned_bytes = info.working_bytes = 0;
    memcpy(state, &info, sizeof info);
    for (uint32_t block = 0; block < n; block++) {
        size_t used;
        assert_int_equal(kvant_tensor_export(tensor, block, state + *bytes, most, &used), KVANT_OK);
        *bytes += used;
    }
    return state;
}

static void begin_both(layer *c, size_t pair)
{
    static float q[TOKENS * WIDTH];
    uint64_t rng = 31;
    assert_int_equal(create_both(c, both_specs[pair], NULL), KVANT_OK);
    fill_normal(q, COUNT(q), &rng);
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = q,
                                    .token_stride = WIDTH,
                                    .head_stride = DIM,
                                    .n_tokens = TOKENS,
                                    .n_heads = HEADS };
    assert_int_equal(kvant_tensor_note_queries(c->tensors[0], &queries, 1), KVANT_OK);
    assert_int_equal(write_both(c, 0, 40), KVANT_OK);
}

static void end_both(layer *c, float *out)
{
    assert_int_equal(write_both(c, 70, TOKENS - 70), KVANT_OK);
    assert_int_equal(attend(c, out), KVANT_OK);
    drop(c);
}

/* --- Threads that do not start --- */

/* When the system starts no thread, calls are slower but right. This test runs first, while the
 * library has no threads yet. */
CASE(threads_that_do_not_start)
{
    float alone[WIDTH], together[WIDTH];
    no_threads = true;
    want_of(plain_specs[0], alone);
    no_threads = false;
    assert_true(threads_refused > 0);
    want_of(plain_specs[0], together);
    assert_memory_equal(alone, together, sizeof alone);
}

CASE(layers)
{
    kvant_calibration *calibration;
    assert_int_equal(calibrate(&calibration), KVANT_OK);
    for (size_t i = 0; i < COUNT(plain_specs); i++)
        refuse_each_allocation(create_and_drop, &(site){ plain_specs[i], NULL }, plain_specs[i],
                               false);
    for (size_t i = 0; i < COUNT(file_specs); i++)
        refuse_each_allocation(create_and_drop, &(site){ file_specs[i], calibration },
                               file_specs[i], false);
    kvant_calibration_free(&calibration);
}

CASE(calibrations)
{
    refuse_each_allocation(calibrate_and_drop, NULL, "calibrate", false);
}

CASE(files)
{
    char path[64], err[256];
    kvant_calibration *calibration;
    snprintf(path, sizeof path, "allocation_failure.%ld", (long)getpid());
    assert_int_equal(calibrate(&calibration), KVANT_OK);
    assert_int_equal(kvant_calibration_save(calibration, path, err, sizeof err), KVANT_OK);
    kvant_calibration_free(&calibration);
    refuse_each_allocation(load_and_drop, path, "load a calibration", false);
    refuse_each_allocation(save_settings, path, "save and load settings", false);
    remove(path);
}

/* A write whose allocation is refused stores nothing and can be repeated. A write that allocates
 * nothing cannot fail. */
CASE(writes)
{
    for (size_t i = 0; i < COUNT(plain_specs); i++) {
        float want[WIDTH], got[WIDTH];
        want_of(plain_specs[i], want);
        for (long at = 1, met = 1; met; at++) {
            layer c;
            assert_int_equal(create(&c, plain_specs[i], NULL), KVANT_OK);
            met = 0;
            for (size_t b = 0; b < 2 * COUNT(batches); b++) {
                const uint32_t first = batches[b / 2][0], n = batches[b / 2][1];
                const int role = (int)(b % 2);
                arm(at, true);
                const kvant_status status = write_rows(&c, role, first, n, rows, 2);
                met += refused;
                assert_int_equal(status, refused ? KVANT_ERR_MEMORY : KVANT_OK);
                arm(0, false);
                if (status != KVANT_OK)
                    assert_int_equal(write_rows(&c, role, first, n, rows, 2), KVANT_OK);
            }
            assert_int_equal(attend(&c, got), KVANT_OK);
            assert_memory_equal(got, want, sizeof got);
            drop(&c);
        }
    }
}

/* The 64th row makes transforms of keys and of values. When the memory of one is refused, neither
 * gets a transform, and the same write later gives the same result as without the failure. */
CASE(writes_of_a_layer)
{
    for (size_t pair = 0; pair < COUNT(both_specs); pair++) {
        float want[WIDTH], got[WIDTH];
        layer c;
        begin_both(&c, pair);
        assert_int_equal(write_both(&c, 40, 30), KVANT_OK);
        end_both(&c, want);
        for (long at = 1, met = 1; met; at++) {
            uint8_t *before[2], *after;
            size_t bytes[2], n;
            begin_both(&c, pair);
            for (int role = 0; role < 2; role++)
                before[role] = state_of(c.tensors[role], &bytes[role]);
            arm(at, true);
            const kvant_status status = write_both(&c, 40, 30);
            met = refused;
            arm(0, false);
            assert_int_equal(status, met ? KVANT_ERR_MEMORY : KVANT_OK);
            for (int role = 0; role < 2; role++) {
                after = state_of(c.tensors[role], &n);
                if (met && (n != bytes[role] || memcmp(after, before[role], n) != 0))
                    fail_msg("%s, allocation %ld: %s are others", both_specs[pair][0], at,
                             role ? "values" : "keys");
                free(after);
                free(before[role]);
            }
            if (met)
                assert_int_equal(write_both(&c, 40, 30), KVANT_OK);
            end_both(&c, got);
            assert_memory_equal(got, want, sizeof got);
        }
    }
}

/* Attention works in the workspace that the caller gives it and allocates no memory. */
CASE(attention_does_not_allocate)
{
    for (size_t i = 0; i < COUNT(plain_specs); i++) {
        layer c;
        float out[WIDTH];
        assert_int_equal(create(&c, plain_specs[i], NULL), KVANT_OK);
        for (int role = 0; role < 2; role++)
            assert_int_equal(write_rows(&c, role, 0, TOKENS, rows, 2), KVANT_OK);
        arm(1, true);
        assert_int_equal(attend(&c, out), KVANT_OK);
        assert_int_equal(asked, 0);
        arm(0, false);
        drop(&c);
    }
}

CASE(shifts)
{
    refuse_each_allocation(shift_and_drop, "int-8", "shift", false);
}

int main(void)
{
    fill_rows();
    return run_cases(NULL, NULL);
}
