/* test_plugin_lender.c - the CPU back end whose threads the plug-in borrows. With
 * KVANT_HOST_THREADS=0 the plug-in borrows none, and it never uses a back end that was freed. */
#define _GNU_SOURCE

#include <pthread.h>
#include <sched.h>

#include <kvant/kvant.h>

#include "abi.h"
#include "ggml-cpu.h"
#include "harness.h"

/* A graph with one node for the device KVANT: rows enter a cache on two threads. */
typedef struct rows_graph {
    ggml_backend_t backend;
    struct ggml_context *context, *graph_context;
    ggml_backend_buffer_t buffer;
    struct ggml_cgraph *graph;
} rows_graph;

enum { ROW = 192, N_ROWS = 128 };

static rows_graph make_rows_graph(void)
{
    ggml_backend_dev_t device = ggml_backend_reg_dev_get(harness_plugin(), 0);
    struct ggml_init_params params = { .mem_size = 64 * ggml_tensor_overhead(), .no_alloc = true },
                            graph_params = { .mem_size = ggml_graph_overhead() + 4096,
                                             .no_alloc = true };
    rows_graph g = { .context = ggml_init(params), .graph_context = ggml_init(graph_params) };
    struct ggml_tensor *cache, *rows, *index, *node;
    float numbers[ROW];
    uint64_t seed = 1;

    setenv("KVANT_K", "turboquant-4", 1);
    setenv("KVANT_V", "turboquant-4", 1);
    setenv("KVANT_HEAD_DIM", "64", 1);
    g.backend = ggml_backend_dev_init(device, NULL);
    assert_non_null(g.backend);
    unsetenv("KVANT_HEAD_DIM");
    cache = ggml_new_tensor_3d(g.context, GGML_TYPE_F16, ROW, N_ROWS,
                               2); /* rows of one stream would be pending until a mask comes */
    ggml_set_name(cache, "cache_k_l0");
    /* Keys without values would stay in llama.cpp's own cache. */
    ggml_set_name(ggml_new_tensor_3d(g.context, GGML_TYPE_F16, ROW, N_ROWS, 2), "cache_v_l0");
    rows = ggml_new_tensor_2d(g.context, GGML_TYPE_F32, ROW, N_ROWS);
    index = ggml_new_tensor_1d(g.context, GGML_TYPE_I64, N_ROWS);
    g.buffer =
        ggml_backend_alloc_ctx_tensors_from_buft(g.context, ggml_backend_dev_buffer_type(device));
    assert_non_null(g.buffer);
    for (int64_t i = 0; i < N_ROWS; i++) {
        for (int j = 0; j < ROW; j++)
            numbers[j] = harness_random(&seed);
        ggml_backend_tensor_set(rows, numbers, (size_t)i * sizeof(numbers), sizeof(numbers));
        ggml_backend_tensor_set(index, &i, (size_t)i * sizeof(i), sizeof(i));
    }
    g.graph = ggml_new_graph(g.graph_context);
    cache = ggml_reshape_2d(g.graph_context, cache, ROW, 2 * N_ROWS);
    ggml_backend_view_init(cache);
    node = ggml_set_rows(g.graph_context, cache, rows, index);
    ggml_backend_view_init(node);
    ggml_build_forward_expand(g.graph, node);
    return g;
}

static void free_rows_graph(rows_graph *g)
{
    ggml_backend_buffer_free(g->buffer);
    ggml_free(g->context);
    ggml_free(g->graph_context);
    ggml_backend_free(g->backend);
}

/* Makes llama.cpp's calls before a graph, and computes the graph. With lender NULL it makes no
 * calls. */
static void compute_rows(rows_graph *g, ggml_backend_t lender, struct ggml_threadpool *pool)
{
    void (*set_threadpool)(ggml_backend_t, struct ggml_threadpool *),
        (*set_n_threads)(ggml_backend_t, int);
    void *address = harness_cpu_function("ggml_backend_cpu_set_threadpool");

    memcpy(&set_threadpool, &address, sizeof(address));
    address = ggml_backend_reg_get_proc_address(harness_plugin(), "ggml_backend_set_n_threads");
    memcpy(&set_n_threads, &address, sizeof(address));
    if (lender != NULL)
        set_threadpool(lender, pool);
    set_n_threads(g->backend, 2);
    assert_int_equal(ggml_backend_graph_compute(g->backend, g->graph), GGML_STATUS_SUCCESS);
}

/* A CPU back end that counts the graphs that it has to compute. Its memory stays when it is freed,
 * so that a later use is counted, too, instead of ending the test. */
static abi_backend counting, *counted;
static int n_computed, n_freed;

static int32_t count_compute(abi_backend *backend, abi_graph *graph)
{
    n_computed++;
    return counted->iface.graph_compute(counted, graph);
}

static void count_free(abi_backend *backend)
{
    assert_ptr_equal(backend, &counting);
    n_freed++;
}

static ggml_backend_t make_counting(ggml_backend_t cpu)
{
    counted = (abi_backend *)(void *)cpu;
    counting = *counted;
    counting.iface.graph_compute = count_compute;
    counting.iface.free = count_free;
    n_computed = n_freed = 0;
    return (ggml_backend_t)(void *)&counting;
}

static void *free_backend(void *backend)
{
    ggml_backend_free(backend);
    return NULL;
}

static void note_threads(struct ggml_tensor *node, int thread, int n_threads, void *most)
{
    if (thread == 0)
        *(int *)most = n_threads;
}

/* The number of threads with which a back end computes a graph. */
static int threads_of(ggml_backend_t cpu)
{
    struct ggml_init_params params = { .mem_size =
                                           ggml_graph_overhead() + 4 * ggml_tensor_overhead() };
    struct ggml_context *context = ggml_init(params);
    struct ggml_cgraph *graph = ggml_new_graph(context);
    int n = 0;
    struct ggml_tensor *node = ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, NULL, 0,
                                              note_threads, GGML_N_TASKS_MAX, &n);

    ggml_build_forward_expand(graph, node);
    assert_int_equal(ggml_backend_graph_compute(cpu, graph), GGML_STATUS_SUCCESS);
    ggml_free(context);
    return n;
}

/* Makes llama.cpp's calls before a graph. ours: NULL for a context without kvant. */
static void set_threads(ggml_backend_t ours, ggml_backend_t cpu, int n)
{
    void (*set_threadpool)(ggml_backend_t, struct ggml_threadpool *);
    void (*set_n_threads)(ggml_backend_t, int);
    void *address = harness_cpu_function("ggml_backend_cpu_set_threadpool");

    memcpy(&set_threadpool, &address, sizeof(address));
    set_threadpool(cpu, NULL);
    address = ggml_backend_reg_get_proc_address(harness_plugin(), "ggml_backend_set_n_threads");
    memcpy(&set_n_threads, &address, sizeof(address));
    if (ours != NULL)
        set_n_threads(ours, n);
    address = harness_cpu_function("ggml_backend_set_n_threads");
    memcpy(&set_n_threads, &address, sizeof(address));
    set_n_threads(cpu, n);
}

/* Runs first, because functions that the process looks up later are the plug-in's. */
CASE(switched_off_nothing_changes)
{
    void *before = harness_cpu_function("ggml_backend_cpu_set_threadpool");
    struct ggml_threadpool *pool = harness_new_pool(2);
    ggml_backend_t cpu = ggml_backend_dev_init(
                       ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), NULL),
                   lender;
    rows_graph g;

    setenv("KVANT_HOST_THREADS", "0", 1);
    g = make_rows_graph();
    assert_ptr_equal(harness_cpu_function("ggml_backend_cpu_set_threadpool"), before);
    lender = make_counting(cpu);
    compute_rows(&g, lender, pool);
    assert_int_equal(n_computed, 0);
    free_rows_graph(&g);
    setenv("KVANT_HOST_THREADS", "1", 1);
    g = make_rows_graph();
    assert_ptr_not_equal(harness_cpu_function("ggml_backend_cpu_set_threadpool"), before);
    free_rows_graph(&g);
    unsetenv("KVANT_HOST_THREADS");
    ggml_backend_free(lender);
    ggml_backend_free(cpu);
    harness_free_pool(pool);
}

/* The limit holds from the start of a graph whose first part has no node of the plug-in. */
CASE(a_lender_has_no_more_threads_than_cpus)
{
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_t lender = ggml_backend_dev_init(device, NULL);
    ggml_backend_t other = ggml_backend_dev_init(device, NULL);
    rows_graph g = make_rows_graph();
    const int n_cpus = (int)kvant_available_cpus(), n = n_cpus + 2;

    set_threads(g.backend, lender, n);
    set_threads(NULL, other, n);
    assert_int_equal(threads_of(lender), n_cpus);
    assert_int_equal(threads_of(other), n);
    set_threads(g.backend, lender, 1);
    assert_int_equal(threads_of(lender), 1);
    free_rows_graph(&g);
    ggml_backend_free(lender);
    ggml_backend_free(other);
}

CASE(a_freed_lender_is_never_used)
{
    struct ggml_threadpool *pool = harness_new_pool(2);
    ggml_backend_t cpu = ggml_backend_dev_init(
                       ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), NULL),
                   lender;
    rows_graph g = make_rows_graph();
    void (*set_threadpool)(ggml_backend_t, struct ggml_threadpool *),
        (*set_n_threads)(ggml_backend_t, int);
    void *address = harness_cpu_function("ggml_backend_cpu_set_threadpool");
    pthread_t other;

    memcpy(&set_threadpool, &address, sizeof(address));
    address = harness_cpu_function("ggml_backend_set_n_threads");
    memcpy(&set_n_threads, &address, sizeof(address));
    /* as llama.cpp does: with OpenMP, ggml relies on the pool being as large */
    set_n_threads(cpu, 2);
    lender = make_counting(cpu);
    compute_rows(&g, lender, pool);
    assert_int_not_equal(n_computed, 0);

    set_threadpool(lender, pool); /* as before a graph that is then never computed */
    n_computed = 0;
    assert_int_equal(pthread_create(&other, NULL, free_backend, lender), 0);
    pthread_join(other, NULL);
    assert_int_equal(n_freed, 1);
    compute_rows(&g, NULL, NULL);
    assert_int_equal(n_computed, 0);

    /* A new back end at the same address is another back end. */
    lender = make_counting(cpu);
    assert_int_equal(ggml_backend_graph_compute(g.backend, g.graph), GGML_STATUS_SUCCESS);
    assert_int_equal(n_computed, 0);
    compute_rows(&g, lender, pool);
    assert_int_not_equal(n_computed, 0);
    ggml_backend_free(lender);
    assert_int_equal(n_freed, 1);
    free_rows_graph(&g);
    set_threadpool(cpu, NULL);
    ggml_backend_free(cpu);
    harness_free_pool(pool);
}

/* With one CPU, no thread is lent. */
static int load_with_two_cpus(void **state)
{
    cpu_set_t allowed;

    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) < 2) {
        print_message("skipped: needs two CPUs\n");
        exit(77);
    }
    return harness_load_plugin(state);
}

RUN_CASES(load_with_two_cpus, NULL)
