/* test_allocation_failure.c - every allocation of create, write and calibrate fails once, and every allocation from it on; so do threads.
 *
 * The linker puts the functions __wrap_* below between the library and the C library (tests/unit/CMakeLists.txt). A call that meets a
 * refused allocation must report KVANT_ERR_MEMORY, leave a NULL object or one that still works, and leak nothing: blocks are counted
 * here, and AddressSanitizer's build sees bytes as well. The functions under "The cache" are all that knows the cache's interface. */
#include "testing.h"

#include <kvant/attention.h>
#include <kvant/calibration.h>
#include <kvant/settings.h>

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

/* --- Memory --- */

void *__real_malloc(size_t);
void *__real_calloc(size_t, size_t);
void *__real_realloc(void *, size_t);
void *__real_aligned_alloc(size_t, size_t);
void __real_free(void *);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void __wrap_free(void *memory);

static atomic_long asked, refused; /* since arm */
static atomic_long blocks;         /* in use */
static long fail_at;               /* the first allocation refused; 0: none */
static bool fail_on;               /* and all after it */

static void arm(long at, bool on)
{
    asked = refused = 0;
    fail_at = at;
    fail_on = on;
}

static bool refuse(void)
{
    const long number = atomic_fetch_add(&asked, 1) + 1;
    const bool no = fail_at != 0 && (number == fail_at || (fail_on && number > fail_at));
    if (no)
        refused++;
    return no;
}

static void *counted(void *memory)
{
    if (memory)
        blocks++;
    return memory;
}

void *__wrap_malloc(size_t bytes)
{
    return refuse() ? NULL : counted(__real_malloc(bytes));
}

void *__wrap_calloc(size_t count, size_t size)
{
    return refuse() ? NULL : counted(__real_calloc(count, size));
}

void *__wrap_realloc(void *old, size_t bytes)
{
    if (refuse())
        return NULL;
    void *memory = __real_realloc(old, bytes);
    return old ? memory : counted(memory);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return refuse() ? NULL : counted(__real_aligned_alloc(alignment, bytes));
}

void __wrap_free(void *memory)
{
    if (memory)
        blocks--;
    __real_free(memory);
}

/* --- Threads --- */

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument);

static bool no_threads;
static long threads_refused;

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    if (!no_threads)
        return __real_pthread_create(thread, attributes, start, argument);
    threads_refused++;
    return EAGAIN;
}

/* --- The cache --- */

enum { DIM = 64, HEADS = 2, CELLS = 200, WIDTH = HEADS * DIM };

typedef struct cache {
    kvant_codec *codecs[2];
    kvant_cells *cells[2];
    void *pages[2];
} cache;

static void drop(cache *c)
{
    for (int role = 0; role < 2; role++) {
        kvant_cells_free(&c->cells[role]);
        kvant_codec_free(&c->codecs[role]);
        assert_null(c->cells[role]);
        assert_null(c->codecs[role]);
        free(c->pages[role]);
        c->pages[role] = NULL;
    }
}

/* What a failed call was to make is NULL; the caller drops the rest. */
static kvant_status create(cache *c, const char *spec, const kvant_calibration *calibration)
{
    memset(c, 0, sizeof *c);
    for (int role = 0; role < 2; role++) {
        char err[256] = "";
        kvant_status status = kvant_codec_create_calibrated(spec, DIM, (kvant_role)role, TEST_SEED, calibration, 0, 0,
                                                            &c->codecs[role], err, sizeof err);
        if (status != KVANT_OK) {
            assert_null(c->codecs[role]);
            assert_int_not_equal(err[0], 0);
            return status;
        }
        kvant_cells_config config = { .size = sizeof config, .codec = c->codecs[role], .n_kv_heads = HEADS,
                                      .n_streams = 1, .n_cells = CELLS };
        const size_t bytes = kvant_cells_bytes(&config);
        assert_true(bytes > 0);
        c->pages[role] = aligned_alloc(64, bytes);
        if (!c->pages[role])
            return KVANT_ERR_MEMORY;
        memset(c->pages[role], 0, bytes);
        status = kvant_cells_create(&config, c->pages[role], &c->cells[role]);
        if (status != KVANT_OK) {
            assert_null(c->cells[role]);
            return status;
        }
    }
    return KVANT_OK;
}

static kvant_status write_rows(cache *c, uint32_t first, uint32_t n, const float *rows, uint32_t n_threads)
{
    static int64_t index[CELLS];
    for (uint32_t i = 0; i < n; i++)
        index[i] = first + i;
    for (int role = 0; role < 2; role++) {
        kvant_status status = kvant_cells_write(c->cells[role], index, n, rows + (size_t)first * WIDTH, WIDTH, n_threads);
        if (status != KVANT_OK)
            return status;
    }
    return KVANT_OK;
}

/* A query of every head over all cells. */
static kvant_status attend(const cache *c, float *out)
{
    static _Alignas(64) uint8_t workspace[8 << 20];
    static float q[WIDTH];
    for (uint32_t i = 0; i < WIDTH; i++)
        q[i] = (float)(i % 7) - 3;
    const kvant_attention_args args = { .size = sizeof args, .k = c->cells[0], .v = c->cells[1], .n_cells = CELLS,
                                        .n_tokens = 1, .n_heads = HEADS, .q = q, .q_token_stride = WIDTH,
                                        .q_head_stride = DIM, .scale = 0.125f, .out = out, .out_token_stride = WIDTH,
                                        .out_head_stride = DIM, .n_threads = 2 };
    assert_in_range(kvant_attention_workspace(&args), 1, sizeof workspace);
    return kvant_attention(&args, workspace, sizeof workspace);
}

/* --- What is tried --- */

static const char *const plain_specs[] = { "turboquant-4",
                                           "trellis-4:center=first,norm=first",
                                           "int-4:axis=channel,group=32,recent=32,sink=4",
                                           "octopus-4",
                                           "hqmq-s96r4:med3",
                                           "turboquant-3:qjl",
                                           "turboquant-2.5",
                                           "int-4:rotate=dense" };
static const char *const file_specs[] = { "trellis-4:transform=file", "turboquant-4:transform=file,feedback",
                                          "turboquant-4:center=file,norm=file", "kmeans-4:c=4", "hessian-4" };

static float rows[CELLS * WIDTH];

static void fill_rows(void)
{
    uint64_t rng = 31;
    fill_normal(rows, COUNT(rows), &rng);
}

/* One kv head of a few rows: quick, because it is made once for each of its allocations. */
static kvant_status calibrate(kvant_calibration **calibration)
{
    static const uint32_t clusters[] = { 4 };
    kvant_calibrator_config config = { .size = sizeof config, .model = "small", .seed = 9, .clusters = clusters,
                                       .n_codebooks = 1, .sample_rows = 40 };
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

/* A call, tried with its first allocation refused, its second, and so on until it needs no more. Each call cleans up after itself. */
typedef kvant_status attempt(const void *context);

static void refuse_each_allocation(attempt *call, const void *context, const char *what)
{
    assert_int_equal(call(context), KVANT_OK); /* what the library keeps for good is there now */
    const long before = blocks;
    for (int on = 0; on < 2; on++)
        for (long at = 1;; at++) {
            arm(at, on);
            const kvant_status status = call(context);
            const long met = refused;
            arm(0, false);
            if (blocks != before)
                fail_msg("%s: allocation %ld refused%s: %ld blocks leak", what, at, on ? ", and all later ones" : "",
                         blocks - before);
            if (status != (met ? KVANT_ERR_MEMORY : KVANT_OK))
                fail_msg("%s: allocation %ld refused (%ld times): %s", what, at, met, kvant_strerror(status));
            if (met == 0) {
                assert_true(at > 1); /* else nothing was tried */
                break;
            }
        }
}

typedef struct site {
    const char *spec;
    const kvant_calibration *calibration;
} site;

static kvant_status create_and_drop(const void *context)
{
    const site *s = context;
    cache c;
    const kvant_status status = create(&c, s->spec, s->calibration);
    drop(&c);
    return status;
}

static void caches(void **state)
{
    kvant_calibration *calibration;
    (void)state;
    assert_int_equal(calibrate(&calibration), KVANT_OK);
    for (size_t i = 0; i < COUNT(plain_specs); i++)
        refuse_each_allocation(create_and_drop, &(site){ plain_specs[i], NULL }, plain_specs[i]);
    for (size_t i = 0; i < COUNT(file_specs); i++)
        refuse_each_allocation(create_and_drop, &(site){ file_specs[i], calibration }, file_specs[i]);
    kvant_calibration_free(&calibration);
}

static kvant_status calibrate_and_drop(const void *context)
{
    kvant_calibration *calibration;
    const kvant_status status = calibrate(&calibration);
    (void)context;
    kvant_calibration_free(&calibration);
    return status;
}

static void calibrations(void **state)
{
    (void)state;
    refuse_each_allocation(calibrate_and_drop, NULL, "calibrate");
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
    const kvant_settings_config config = { .size = sizeof config, .model = "small", .n_layers = 1, .layers = layers };
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

static void files(void **state)
{
    char path[64], err[256];
    kvant_calibration *calibration;
    (void)state;
    snprintf(path, sizeof path, "allocation_failure.%ld", (long)getpid());
    assert_int_equal(calibrate(&calibration), KVANT_OK);
    assert_int_equal(kvant_calibration_save(calibration, path, err, sizeof err), KVANT_OK);
    kvant_calibration_free(&calibration);
    refuse_each_allocation(load_and_drop, path, "load a calibration");
    refuse_each_allocation(save_settings, path, "save and load settings");
    remove(path);
}

/* What a cache gives when nothing fails: rows in two calls, then attention. */
static void want_of(const char *spec, float *out)
{
    cache c;
    assert_int_equal(create(&c, spec, NULL), KVANT_OK);
    assert_int_equal(write_rows(&c, 0, 70, rows, 2), KVANT_OK);
    assert_int_equal(write_rows(&c, 70, CELLS - 70, rows, 2), KVANT_OK);
    assert_int_equal(attend(&c, out), KVANT_OK);
    drop(&c);
}

/* A write that meets a refused allocation stores nothing and can be repeated; one that asks for no memory cannot fail. */
static void writes(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(plain_specs); i++) {
        float want[WIDTH], got[WIDTH];
        want_of(plain_specs[i], want);
        for (long at = 1, met = 1; met; at++) {
            cache c;
            assert_int_equal(create(&c, plain_specs[i], NULL), KVANT_OK);
            met = 0;
            for (uint32_t first = 0; first < CELLS; first += first ? CELLS - 70 : 70) {
                const uint32_t n = first ? CELLS - 70 : 70;
                arm(at, true);
                const kvant_status status = write_rows(&c, first, n, rows, 2);
                met += refused;
                assert_int_equal(status, refused ? KVANT_ERR_MEMORY : KVANT_OK);
                arm(0, false);
                if (status != KVANT_OK)
                    assert_int_equal(write_rows(&c, first, n, rows, 2), KVANT_OK);
            }
            assert_int_equal(attend(&c, got), KVANT_OK);
            assert_memory_equal(got, want, sizeof got);
            drop(&c);
        }
    }
}

/* Attention has its workspace: it asks for no memory. */
static void attention_does_not_allocate(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(plain_specs); i++) {
        cache c;
        float out[WIDTH];
        assert_int_equal(create(&c, plain_specs[i], NULL), KVANT_OK);
        assert_int_equal(write_rows(&c, 0, CELLS, rows, 2), KVANT_OK);
        arm(1, true);
        assert_int_equal(attend(&c, out), KVANT_OK);
        assert_int_equal(asked, 0);
        arm(0, false);
        drop(&c);
    }
}

/* A system that starts no thread makes calls slower, not wrong. The first test, while the library has no threads yet. */
static void threads_that_do_not_start(void **state)
{
    float alone[WIDTH], together[WIDTH];
    (void)state;
    no_threads = true;
    want_of(plain_specs[0], alone);
    no_threads = false;
    assert_true(threads_refused > 0);
    want_of(plain_specs[0], together);
    assert_memory_equal(alone, together, sizeof alone);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_that_do_not_start),
        cmocka_unit_test(caches), cmocka_unit_test(calibrations), cmocka_unit_test(files),
        cmocka_unit_test(writes), cmocka_unit_test(attention_does_not_allocate),
    };
    fill_rows();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
