/* test_plugin_cpu_graph.c - nodes on caches inside the graphs of the CPU back end, as ggml's
 * scheduler cuts them. Results have the bits that the device KVANT computes. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "ops_fixture.h"

#define N_ROWS N_CELLS
#define N_TOKENS 5

static const struct attention_case shape = { "one stream", 6,        2, 64, 64,
                                             N_CELLS,      N_TOKENS, 1, 0,  true,
                                             false,        0,        0 };

/* A context as llama.cpp makes it: the back end of the cache, then the CPU's. */
typedef struct setup {
    ggml_backend_t kvant, cpu;
    ggml_backend_sched_t sched;
    struct ggml_context *context;
    struct ggml_tensor *k, *v;
    ggml_backend_buffer_t buffer;
} setup;

static void set_n_threads(ggml_backend_t backend, int n)
{
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    void (*set)(ggml_backend_t, int);
    void *address = ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");

    memcpy(&set, &address, sizeof(address));
    set(backend, n);
}

static setup open_setup(const char *spec, const char *lend)
{
    struct ggml_init_params params = { .mem_size = 8 * ggml_tensor_overhead(), .no_alloc = true };
    setup s = { .context = ggml_init(params) };
    ggml_backend_t backends[2];

    setenv("KVANT_K", spec, 1);
    setenv("KVANT_V", spec, 1);
    setenv("KVANT_HOST_THREADS", lend, 1);
    backends[0] = s.kvant = ggml_backend_dev_init(kvant_device(), NULL);
    backends[1] = s.cpu =
        ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), NULL);
    unsetenv("KVANT_HOST_THREADS");
    s.sched = ggml_backend_sched_new(backends, NULL, 2, 64, false, false);
    s.k = ggml_new_tensor_3d(s.context, GGML_TYPE_F16, 128, N_CELLS, 1);
    s.v = ggml_new_tensor_3d(s.context, GGML_TYPE_F16, 128, N_CELLS, 1);
    ggml_set_name(s.k, "cache_k_l0");
    ggml_set_name(s.v, "cache_v_l0");
    s.buffer = ggml_backend_alloc_ctx_tensors_from_buft(
        s.context, ggml_backend_dev_buffer_type(kvant_device()));
    assert_non_null(s.buffer);
    ggml_backend_buffer_clear(s.buffer, 0);
    return s;
}

static void close_setup(setup *s)
{
    ggml_backend_sched_free(s->sched);
    ggml_backend_buffer_free(s->buffer);
    ggml_free(s->context);
    ggml_backend_free(s->kvant);
    ggml_backend_free(s->cpu);
}

typedef struct outcome {
    enum ggml_status status;
    int n_splits;
    float out[N_TOKENS * 6 * 64];
} outcome;

static struct ggml_tensor *heads(struct ggml_context *context, struct ggml_tensor *cache)
{
    return ggml_permute(
        context,
        ggml_view_4d(context, cache, 64, 2, N_CELLS, 1, 128, cache->nb[1], cache->nb[2], 0), 0, 2,
        1, 3);
}

/* Stores rows and attends to them, with nodes of the CPU before and after. mask_heads: 1, or one
 * mask for each head, which kvant does not compute. */
static outcome run(setup *s, int n_threads, int mask_heads)
{
    struct ggml_init_params params = { .mem_size =
                                           64 * ggml_tensor_overhead() + ggml_graph_overhead(),
                                       .no_alloc = true };
    struct ggml_context *c = ggml_init(params);
    struct ggml_cgraph *graph = ggml_new_graph(c);
    struct inputs in = (random_state = 7, make_inputs(&shape));
    struct ggml_tensor *q = ggml_new_tensor_3d(c, GGML_TYPE_F32, 64, 6, N_TOKENS),
                       *k = ggml_new_tensor_2d(c, GGML_TYPE_F32, 128, N_ROWS),
                       *v = ggml_new_tensor_2d(c, GGML_TYPE_F32, 128, N_ROWS),
                       *index = ggml_new_tensor_1d(c, GGML_TYPE_I64, N_ROWS),
                       *mask = ggml_new_tensor_3d(c, GGML_TYPE_F16, N_CELLS, N_TOKENS, mask_heads),
                       *inputs[] = { q, k, v, index, mask }, *out;
    const void *data[] = { in.q, in.k, in.v, in.index, in.mask };
    outcome got = { 0 };

    for (int i = 0; i < 5; i++)
        ggml_set_input(inputs[i]);
    k = ggml_scale(c, k, 1);
    v = ggml_scale(c, v, 1);
    ggml_build_forward_expand(graph,
                              ggml_set_rows(c, ggml_reshape_2d(c, s->k, 128, N_CELLS), k, index));
    ggml_build_forward_expand(graph,
                              ggml_set_rows(c, ggml_reshape_2d(c, s->v, 128, N_CELLS), v, index));
    out = ggml_flash_attn_ext(c, ggml_permute(c, ggml_scale(c, q, 1), 0, 2, 1, 3), heads(c, s->k),
                              heads(c, s->v), mask, 0.125f, 0, 0);
    out = ggml_scale(c, out, 2);
    ggml_set_output(out);
    ggml_build_forward_expand(graph, out);
    ggml_backend_sched_reset(s->sched);
    assert_true(ggml_backend_sched_alloc_graph(s->sched, graph));
    for (int i = 0; i < 4; i++)
        ggml_backend_tensor_set(inputs[i], data[i], 0, ggml_nbytes(inputs[i]));
    for (int i = 0; i < mask_heads; i++)
        ggml_backend_tensor_set(mask, in.mask, (size_t)i * mask->nb[2], mask->nb[2]);
    set_n_threads(s->kvant, n_threads);
    set_n_threads(s->cpu, n_threads);
    got.n_splits = ggml_backend_sched_get_n_splits(s->sched);
    got.status = ggml_backend_sched_graph_compute(s->sched, graph);
    ggml_backend_tensor_get(out, got.out, 0, sizeof(got.out));
    free_inputs(&in);
    ggml_free(c);
    return got;
}

static void assert_same(const outcome *a, const outcome *b)
{
    assert_int_equal(a->status, GGML_STATUS_SUCCESS);
    assert_int_equal(b->status, GGML_STATUS_SUCCESS);
    assert_memory_equal(a->out, b->out, sizeof(a->out));
}

/* Before its first graph the context belongs to KVANT, because llama.cpp looks for attention's
 * device. */
CASE(the_cpu_takes_the_whole_graph)
{
    setup alone = open_setup("turboquant-4", "0"), both = open_setup("turboquant-4", "1");
    outcome first = run(&alone, 1, 1), cut = run(&both, 1, 1);

    assert_true(first.n_splits > 1);
    assert_int_equal(run(&alone, 1, 1).n_splits, first.n_splits);
    assert_same(&first, &cut);
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        outcome whole = run(&both, n_threads, 1);
        assert_int_equal(whole.n_splits, 1);
        assert_same(&first, &whole);
    }
    close_setup(&alone);
    close_setup(&both);
}

/* A mask for each head: ggml's own attention reads decoded rows. A graph that was cut for the CPU
 * fails, and the next one is cut for KVANT. */
CASE(other_readers_get_decoded_rows)
{
    setup alone = open_setup("turboquant-4", "0"), both = open_setup("turboquant-4", "1");
    outcome decoded = run(&alone, 1, 6), got;

    assert_int_equal(decoded.status, GGML_STATUS_SUCCESS);
    run(&both, 1, 1);
    assert_int_equal(run(&both, 1, 1).n_splits, 1);
    got = run(&both, 1, 6);
    if (got.status == GGML_STATUS_SUCCESS)
        assert_same(&decoded, &got);
    got = run(&both, 1, 6);
    assert_same(&decoded, &got);
    close_setup(&alone);
    close_setup(&both);
}

/* A graph with a node on a cache whose back end was freed fails. Ggml's own functions would take
 * codes for f16. */
CASE(a_freed_back_end_is_not_used)
{
    setup s = open_setup("turboquant-4", "1");

    run(&s, 2, 1);
    assert_int_equal(run(&s, 2, 1).n_splits, 1);
    ggml_backend_free(s.kvant);
    s.kvant = ggml_backend_dev_init(kvant_device(), NULL); /* of no cache */
    assert_int_equal(run(&s, 2, 1).status, GGML_STATUS_FAILED);
    close_setup(&s);
}

RUN_CASES(harness_load_plugin, NULL)
