/* test_concurrent.c - calls that the headers allow several threads to make at once. They are
 * attention over one layer with different workspaces, writes to more layers with the same codecs,
 * and creation of codecs. All threads share one pool. Results must equal the results of a single
 * thread, and the build for ThreadSanitizer (make tsan) finds races whose results are right by
 * luck.
 *
 * Only the functions under "A layer" call the library's interface. */
#include "testing.h"

#include <kvant/attention.h>

#include <pthread.h>

enum { DIM = 64, KV_HEADS = 2, HEADS = 4, TOKENS = 192, WIDTH = KV_HEADS * DIM, OUT = HEADS * DIM };
enum { READERS = 3, WRITERS = 2, CREATORS = 2, ROUNDS = 6, WORKSPACE = 8 << 20 };

static const char *const specs[] = { "turboquant-4", "trellis-3:center=first,norm=first",
                                     PAPERS(
                                         "octopus-3", ) "int-4:axis=channel,group=32,recent=32" };

static float rows[TOKENS * WIDTH], query[OUT];

/* --- A layer --- */

typedef struct layer {
    const kvant_codec *codecs[2];
    kvant_tensor *tensors[2];
    void *pages[2];
} layer;

/* Creates a layer with codecs that other threads use, too. */
static kvant_status create(layer *c, const kvant_codec *k, const kvant_codec *v)
{
    *c = (layer){ .codecs = { k, v } };
    for (int role = 0; role < 2; role++) {
        const kvant_codec *const heads[KV_HEADS] = { c->codecs[role], c->codecs[role] };
        const kvant_tensor_params params = { .size = sizeof params,
                                             .codecs = heads,
                                             .n_kv_heads = KV_HEADS,
                                             .n_sequences = 1,
                                             .n_blocks = TOKENS / 64 };
        size_t bytes;
        kvant_status status = kvant_tensor_size(&params, &bytes);
        if (status != KVANT_OK)
            return status;
        c->pages[role] = calloc(1, bytes + 64);
        void *start = (void *)(((uintptr_t)c->pages[role] + 63) / 64 * 64);
        status = kvant_tensor_create(&params, start, &c->tensors[role]);
        if (status != KVANT_OK)
            return status;
    }
    return KVANT_OK;
}

static void drop(layer *c)
{
    for (int role = 0; role < 2; role++) {
        kvant_tensor_free(&c->tensors[role]);
        free(c->pages[role]);
    }
}

static kvant_status write_all(layer *c)
{
    int64_t slots[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++)
        slots[i] = i;
    for (int role = 0; role < 2; role++) {
        kvant_status status = kvant_tensor_write(c->tensors[role], slots, 64, rows, WIDTH, 3);
        if (status == KVANT_OK)
            status = kvant_tensor_write(c->tensors[role], slots + 64, TOKENS - 64,
                                        rows + 64 * WIDTH, WIDTH, 3);
        if (status != KVANT_OK)
            return status;
    }
    return KVANT_OK;
}

static kvant_status attend(const layer *c, void *workspace, float *out)
{
    const kvant_attention_problem problem = { .size = sizeof problem,
                                              .n_queries = 1,
                                              .n_tokens = TOKENS,
                                              .n_heads = HEADS,
                                              .n_threads = 3,
                                              .q = query,
                                              .q_token_stride = OUT,
                                              .q_head_stride = DIM,
                                              .out = out,
                                              .out_token_stride = OUT,
                                              .out_head_stride = DIM,
                                              .scale = 0.125f };
    size_t bytes;
    const kvant_status status =
        kvant_attention_workspace(c->tensors[0], c->tensors[1], &problem, &bytes);
    if (status != KVANT_OK)
        return status;
    return bytes <= WORKSPACE
               ? kvant_attention(c->tensors[0], c->tensors[1], &problem, workspace, bytes)
               : KVANT_ERR_FULL;
}

/* --- Threads --- */

typedef struct scene {
    const char *spec;
    kvant_codec *codecs[2];
    layer shared;
    float want[OUT];
    pthread_barrier_t start;
} scene;

/* cmocka's asserts work only in the main thread, so other threads return what went wrong, or
 * NULL. */
static void *read_shared(void *argument)
{
    scene *s = argument;
    void *workspace = aligned_alloc(64, WORKSPACE);
    const char *fault = workspace ? NULL : "no memory";
    pthread_barrier_wait(&s->start);
    for (int i = 0; i < 4 * ROUNDS && !fault; i++) {
        float out[OUT];
        if (attend(&s->shared, workspace, out) != KVANT_OK)
            fault = "attention failed";
        else if (memcmp(out, s->want, sizeof out) != 0)
            fault = "attention gave other numbers than alone";
    }
    free(workspace);
    return (void *)(uintptr_t)fault;
}

static void *write_own(void *argument)
{
    scene *s = argument;
    void *workspace = aligned_alloc(64, WORKSPACE);
    const char *fault = workspace ? NULL : "no memory";
    pthread_barrier_wait(&s->start);
    for (int i = 0; i < ROUNDS && !fault; i++) {
        layer own;
        float out[OUT];
        if (create(&own, s->codecs[0], s->codecs[1]) != KVANT_OK || write_all(&own) != KVANT_OK ||
            attend(&own, workspace, out) != KVANT_OK)
            fault = "a layer of its own failed";
        else if (memcmp(out, s->want, sizeof out) != 0)
            fault = "a layer of its own gave other numbers than alone";
        drop(&own);
    }
    free(workspace);
    return (void *)(uintptr_t)fault;
}

static void *create_codecs(void *argument)
{
    scene *s = argument;
    pthread_barrier_wait(&s->start);
    for (int i = 0; i < ROUNDS; i++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *codec;
            if (kvant_codec_create(s->spec, DIM, (kvant_role)role, TEST_SEED + (uint64_t)i, &codec,
                                   NULL, 0) != KVANT_OK)
                return "a codec was not created";
            kvant_codec_free(&codec);
        }
    return NULL;
}

static void run_together(scene *s)
{
    pthread_t threads[READERS + WRITERS + CREATORS];
    void *fault;
    assert_int_equal(pthread_barrier_init(&s->start, NULL, COUNT(threads)), 0);
    for (size_t i = 0; i < COUNT(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL,
                                        i < READERS             ? read_shared
                                        : i < READERS + WRITERS ? write_own
                                                                : create_codecs,
                                        s),
                         0);
    for (size_t i = 0; i < COUNT(threads); i++) {
        assert_int_equal(pthread_join(threads[i], &fault), 0);
        if (fault)
            fail_msg("%s, thread %zu: %s", s->spec, i, (const char *)fault);
    }
    pthread_barrier_destroy(&s->start);
}

/* All threads use the library for the first time at once, when it fills its tables. */
static void *first_use(void *argument)
{
    pthread_barrier_wait(argument);
    return (void *)(uintptr_t)kvant_get_cpu_level();
}

CASE(first_use_by_all)
{
    pthread_t threads[4];
    pthread_barrier_t start;
    void *levels[4];
    assert_int_equal(pthread_barrier_init(&start, NULL, COUNT(threads)), 0);
    for (size_t i = 0; i < COUNT(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, first_use, &start), 0);
    for (size_t i = 0; i < COUNT(threads); i++) {
        assert_int_equal(pthread_join(threads[i], &levels[i]), 0);
        assert_true((uintptr_t)levels[i] >= KVANT_CPU_C && levels[i] == levels[0]);
    }
    pthread_barrier_destroy(&start);
}

CASE(readers_writers_and_creators)
{
    for (size_t i = 0; i < COUNT(specs); i++) {
        static scene s;
        void *workspace = aligned(WORKSPACE);
        s = (scene){ .spec = specs[i] };
        for (int role = 0; role < 2; role++)
            s.codecs[role] = make_codec(specs[i], DIM, (kvant_role)role);
        assert_int_equal(create(&s.shared, s.codecs[0], s.codecs[1]), KVANT_OK);
        assert_int_equal(write_all(&s.shared), KVANT_OK);
        assert_int_equal(attend(&s.shared, workspace, s.want), KVANT_OK);
        run_together(&s);
        drop(&s.shared);
        kvant_codec_free(&s.codecs[0]);
        kvant_codec_free(&s.codecs[1]);
        free(workspace);
    }
}

int main(void)
{
    uint64_t rng = 17;
    fill_normal(rows, COUNT(rows), &rng);
    fill_normal(query, COUNT(query), &rng);
    return run_cases(NULL, NULL);
}
