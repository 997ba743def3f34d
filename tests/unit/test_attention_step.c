/* test_attention_step.c - kvant_attention_step_run stores a row and attends to it. The numbers and
 * the bytes are those of a write and an attention call of their own. */
#include "attend.h"

#include <kvant/executor.h>

#include "../../src/attention/work_item.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { BLOCKS = 8, TOKENS = 330, THREADS = 4 };

static const kvant_exact_part part = {
    .size = sizeof part, .first = 64, .newest = 128, .total = 192, .step = 64
};

typedef struct layer {
    fixture k, v;
} layer;

static fixture make_side(const char *spec, kvant_role role, bool exact)
{
    fixture f = make_heads(spec, spec, role, 1, BLOCKS, 0), side = f;
    kvant_tensor_free(&f.tensor);
    free(f.memory);
    free(f.rows);
    side.params.exact = exact ? &part : NULL;
    make_tensor(&side);
    return side;
}

static layer make_layer(bool exact)
{
    return (layer){ make_side("trellis-4:transform=first", KVANT_ROLE_K, exact),
                    make_side("trellis-4", KVANT_ROLE_V, exact) };
}

static void drop_layer(layer *l)
{
    drop(&l->k);
    drop(&l->v);
}

/* A workspace that a call asked for. */
typedef struct room {
    void *memory;
    uint32_t n_calls;
    bool fails;
} room;

static void *workspace_of(void *user, size_t bytes)
{
    room *r = user;
    free(r->memory);
    r->memory = r->fails ? NULL : aligned(bytes);
    r->n_calls++;
    if (r->memory)
        memset(r->memory, 0xff, bytes); /* NaNs show a read of memory that was not written */
    return r->memory;
}

static kvant_attention_problem problem_of(uint32_t token, const float *q, attended *result,
                                          uint32_t n_threads)
{
    return (kvant_attention_problem){ .size = sizeof(kvant_attention_problem),
                                      .n_tokens = token + 1,
                                      .n_queries = 1,
                                      .n_heads = N_HEADS,
                                      .q = q,
                                      .q_token_stride = (size_t)N_HEADS * HEAD_DIM,
                                      .q_head_stride = HEAD_DIM,
                                      .out = result->out,
                                      .out_token_stride = (size_t)N_HEADS * HEAD_DIM,
                                      .out_head_stride = HEAD_DIM,
                                      .scale = 0.2f,
                                      .n_threads = n_threads };
}

static kvant_status step(layer *l, uint32_t token, const float *k_row, const float *v_row,
                         const float *q, uint32_t n_threads, room *r, bool *stored,
                         attended *result)
{
    kvant_attention_problem problem = problem_of(token, q, result, n_threads);
    const int32_t position = (int32_t)token;
    kvant_attention_step s = { .slot = token,
                               .k_row = k_row,
                               .v_row = v_row,
                               .position = k_row ? &position : NULL,
                               .workspace = workspace_of,
                               .user = r };
    const kvant_status status = kvant_attention_step_run(l->k.tensor, l->v.tensor, &problem, &s);
    *stored = s.stored;
    assert_true(status != KVANT_OK || !s.position);
    return status;
}

static void fill(float *x, size_t n, uint64_t *rng)
{
    for (size_t i = 0; i < n; i++)
        x[i] = half_number(rng);
}

static void note(layer *l, const float *q, int32_t position)
{
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = q,
                                    .token_stride = (size_t)N_HEADS * HEAD_DIM,
                                    .head_stride = HEAD_DIM,
                                    .n_tokens = 1,
                                    .n_heads = N_HEADS,
                                    .positions = &position };
    assert_ok(kvant_tensor_note_queries(l->k.tensor, &queries, 1));
}

/* An executor whose threads wait for one another, so that several of them are in every loop. */
typedef struct share {
    kvant_executor_work work;
    void *loop;
    uint32_t worker, n_workers;
    atomic_uint *begun;
} share;

static void *run_share(void *argument)
{
    const share *s = argument;
    atomic_fetch_add(s->begun, 1);
    while (atomic_load(s->begun) < s->n_workers)
        sched_yield();
    s->work(s->loop, s->worker);
    return NULL;
}

static void run_on_threads(void *context, uint32_t n_workers, kvant_executor_work work, void *loop)
{
    share each[THREADS];
    pthread_t threads[THREADS];
    atomic_uint begun = 0;
    assert_in_range(n_workers, 2, THREADS);
    ++*(uint32_t *)context;
    for (uint32_t i = 0; i < n_workers; i++) {
        each[i] = (share){ work, loop, i, n_workers, &begun };
        assert_int_equal(pthread_create(&threads[i], NULL, run_share, &each[i]), 0);
    }
    for (uint32_t i = 0; i < n_workers; i++)
        pthread_join(threads[i], NULL);
}

static void compare(bool exact, uint32_t n_threads)
{
    layer apart = make_layer(exact), together = make_layer(exact);
    uint64_t rng = 7;
    room r = { NULL, 0, false };
    static attended want, got;
    for (uint32_t token = 0; token < TOKENS; token++) {
        float k[WIDTH], v[WIDTH], q[N_HEADS * HEAD_DIM];
        const int64_t slot = token;
        bool stored;
        fill(k, COUNT(k), &rng);
        fill(v, COUNT(v), &rng);
        fill(q, COUNT(q), &rng);
        kvant_attention_problem problem = { .n_tokens = token + 1, .n_queries = 1, .scale = 0.2f };
        assert_ok(kvant_tensor_write_layer(apart.k.tensor, apart.v.tensor, &slot, 1, k, WIDTH, v,
                                           WIDTH, 1));
        assert_ok(attend(&apart.k, &apart.v, &problem, q, &want));
        assert_ok(step(&together, token, k, v, q, n_threads, &r, &stored, &got));
        assert_true(stored);
        assert_int_equal(r.n_calls, token + 1);
        assert_memory_equal(got.out, want.out, sizeof q);
        note(&apart, q, (int32_t)token);
    }
    assert_alike(&apart.k, &together.k);
    assert_alike(&apart.v, &together.v);
    free(r.memory);
    drop_layer(&apart);
    drop_layer(&together);
}

CASE(a_step_equals_a_write_and_attention)
{
    uint32_t n_loops = 0;
    const kvant_executor executor = { run_on_threads, &n_loops };
    compare(true, 1);
    compare(false, 1);
    kvant_use_executor(&executor);
    compare(true, THREADS);
    compare(false, THREADS);
    kvant_use_executor(NULL);
    assert_true(n_loops > TOKENS / 2); /* the first tokens are too little work for threads */
}

/* After an error the flag tells whether the row is there. */
CASE(a_step_tells_whether_it_stored_the_row)
{
    layer l = make_layer(true);
    uint64_t rng = 9;
    room r = { NULL, 0, false };
    float row[WIDTH], bad[WIDTH], q[N_HEADS * HEAD_DIM], read[WIDTH];
    static attended result;
    bool stored;
    fill(row, COUNT(row), &rng);
    fill(q, COUNT(q), &rng);
    memcpy(bad, row, sizeof bad);
    bad[3] = NAN;
    assert_ok(step(&l, 0, row, row, q, 2, &r, &stored, &result));
    assert_int_equal(step(&l, 1, row, bad, q, 2, &r, &stored, &result), KVANT_ERR_NONFINITE);
    assert_false(stored);
    assert_int_equal(block_of(&l.k, 0, 0).written, 1);
    r.fails = true;
    assert_int_equal(step(&l, 1, row, row, q, 2, &r, &stored, &result), KVANT_ERR_MEMORY);
    assert_true(stored);
    assert_int_equal(block_of(&l.v, 0, 0).written, 3);
    assert_ok(kvant_tensor_read(l.v.tensor, 1, 1, read, WIDTH));
    assert_ok(kvant_tensor_read(l.v.tensor, 0, 1, bad, WIDTH));
    assert_memory_equal(read, bad, sizeof read);
    assert_int_equal(kvant_attention_step_run(l.k.tensor, l.k.tensor, NULL, NULL),
                     KVANT_ERR_ARGUMENT);
    drop_layer(&l);
}

/* The step's row as a reader sees it: the fp16 row of kv head 0 in its open page. */
typedef struct row_watch {
    const uint16_t *row;
    uint32_t n_shared, n_items;
} row_watch;

static bool is_encoded(const row_watch *watch)
{
    bool any = false;
    for (uint32_t i = 0; i < HEAD_DIM; i++)
        any |= watch->row[i] != 0;
    return any;
}

static void watch_phases(const kvant_attention_plan *plan, float *phases)
{
    row_watch *watch = plan->user;
    (void)phases;
    assert_false(is_encoded(watch));
    watch->n_shared++;
}

static void watch_queries(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                          uint32_t view, uint32_t query, uint32_t n, uint32_t kv_head, float *out,
                          float *offsets, float *products)
{
    (void)kernels, (void)view, (void)query, (void)n, (void)kv_head;
    memset(out, 0, (size_t)plan->group_heads * plan->k_dim * sizeof *out);
    memset(offsets, 0, plan->group_heads * sizeof *offsets);
    memset(products, 0, (size_t)plan->group_heads * plan->k_dim * sizeof *products);
    watch_phases(plan, NULL);
}

static bool watch_item(const kvant_attention_plan *plan, kvant_attention_item *item, uint32_t page)
{
    row_watch *watch = plan->user;
    (void)item, (void)page;
    assert_true(is_encoded(watch));
    watch->n_items++;
    return false; /* the page is hidden */
}

static void watch_output(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         uint32_t transform_id, uint32_t head, const float *sums, float inverse,
                         float weight, float *out)
{
    (void)plan, (void)kernels, (void)transform_id, (void)head;
    (void)sums, (void)inverse, (void)weight, (void)out;
}

/* All work items wait for the shared parts, and only the last items wait for the row. So with one
 * thread the row is encoded after the shared parts and before the work items. */
CASE(a_step_encodes_its_row_after_the_shared_parts)
{
    static const kvant_attention_reader reader = {
        .phases = watch_phases, .queries = watch_queries, .open = watch_item, .output = watch_output
    };
    enum { N_PAGES = 5, TOKEN = 64 * N_PAGES - 1 };
    layer l = make_layer(true);
    uint64_t rng = 13;
    float row[WIDTH], q[N_HEADS * HEAD_DIM];
    static attended result;
    const int64_t slot = TOKEN;
    row_watch watch = { NULL, 0, 0 };
    fill(row, COUNT(row), &rng);
    fill(q, COUNT(q), &rng);
    write_range(&l.k, 0, TOKEN, TOKEN, 1, &rng);
    write_range(&l.v, 0, TOKEN, TOKEN, 1, &rng);
    const kvant_rows rows[] = { { l.k.tensor, row, row, 0 }, { l.v.tensor, row, row, 0 } };
    kvant_write write;
    assert_ok(kvant_write_begin(&write, rows, 2, &slot, 1, 1));
    kvant_write_place(&write.jobs[0]);
    kvant_write_place(&write.jobs[1]);
    uint16_t *page = kvant_open_page_of(l.k.tensor, l.k.tensor->blocks[N_PAGES - 1].open_page, 0);
    memset(page + 63 * HEAD_DIM, 0, HEAD_DIM * sizeof *page);
    watch.row = page + 63 * HEAD_DIM;
    kvant_attention_plan plan = { .problem = problem_of(TOKEN, q, &result, 1),
                                  .reader = &reader,
                                  .k = l.k.tensor,
                                  .v = l.v.tensor,
                                  .write = &write,
                                  .written_block = N_PAGES - 1,
                                  .user = &watch,
                                  .n_kv_heads = N_KV_HEADS,
                                  .k_dim = HEAD_DIM,
                                  .v_dim = HEAD_DIM,
                                  .n_pages = N_PAGES,
                                  .k_views.n = 1,
                                  .v_transforms.n = 1,
                                  .centered = true };
    assert_true(kvant_attention_cut(&plan));
    void *workspace = aligned(plan.total * sizeof(float));
    assert_ok(kvant_attention_run(&plan, workspace, plan.total * sizeof(float)));
    kvant_write_encoded(write.jobs, 2);
    assert_ok(kvant_write_end(&write, KVANT_OK));
    assert_int_equal(watch.n_shared, 1 + N_KV_HEADS);
    assert_int_equal(watch.n_items, N_PAGES * N_KV_HEADS);
    free(workspace);
    drop_layer(&l);
}

/* Without a row only attention runs. */
CASE(a_step_without_a_row_stores_nothing)
{
    layer l = make_layer(true);
    uint64_t rng = 11;
    room r = { NULL, 0, false };
    float q[N_HEADS * HEAD_DIM];
    static attended want, got;
    bool stored;
    kvant_attention_problem problem = { .n_tokens = 70, .n_queries = 1, .scale = 0.2f };
    write_range(&l.k, 0, 70, 70, 1, &rng);
    write_range(&l.v, 0, 70, 70, 1, &rng);
    fill(q, COUNT(q), &rng);
    assert_ok(attend(&l.k, &l.v, &problem, q, &want));
    assert_ok(step(&l, 69, NULL, NULL, q, 2, &r, &stored, &got));
    assert_false(stored);
    assert_memory_equal(got.out, want.out, sizeof q);
    free(r.memory);
    drop_layer(&l);
}

/* Any tensor and any slot will do, before and after rows are learned from. */
CASE(prefetching_changes_nothing)
{
    for (int exact = 0; exact < 2; exact++) {
        layer plain = make_layer(exact), fetched = make_layer(exact);
        for (uint32_t n = 0; n < 200; n++)
            for (int side = 0; side < 2; side++) {
                uint64_t rng = n + 1, same = n + 1;
                fixture *f = side ? &fetched.v : &fetched.k;
                for (uint32_t ahead = 0; ahead < 5; ahead++)
                    for (int64_t slot = -1; slot <= BLOCKS * 64; slot += 64)
                        kvant_tensor_prefetch(f->tensor, slot, ahead);
                write_range(f, n, 1, 1, 1, &rng);
                write_range(side ? &plain.v : &plain.k, n, 1, 1, 1, &same);
            }
        assert_alike(&plain.k, &fetched.k);
        assert_alike(&plain.v, &fetched.v);
        drop_layer(&plain);
        drop_layer(&fetched);
    }
    kvant_tensor_prefetch(NULL, 0, 1);
}

RUN_CASES(NULL, NULL)
