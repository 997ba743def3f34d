/* host_threads.c - see host_threads.h.
 *
 * ggml gives a back end no way to reach the others of its context. But llama.cpp looks ggml_backend_cpu_set_threadpool up by name in
 * the CPU back end's registry entry and calls it before every graph, with the CPU back end and its pool; so this file puts its own
 * look-up into that entry, which answers this one name with a function that takes note and goes on to ggml's. All else is passed
 * on. Where llama.cpp does not ask, nothing is lent. */
#include "host_threads.h"

#include <pthread.h>
#include <string.h>

#include "ggml_api.h"

typedef void set_threadpool_fn(abi_backend *cpu, void *threadpool);

/* Of ggml's CPU back end. */
static struct {
    void *(*get_proc_address)(abi_reg *reg, const char *name);
    set_threadpool_fn *set_threadpool;
    bool openmp; /* its workers are OpenMP's, which wait for a while without a pool too */
} host;

/* Between the two calls before a graph; back ends of a context are freed together, so its own graphs may use it. */
static _Thread_local abi_backend *last_lender;

/* Without pool and OpenMP ggml starts threads for each graph: nobody waits. */
static void set_threadpool(abi_backend *cpu, void *threadpool)
{
    host.set_threadpool(cpu, threadpool);
    last_lender = threadpool != NULL || host.openmp ? cpu : NULL;
}

static void *get_proc_address(abi_reg *reg, const char *name)
{
    void *address = host.get_proc_address(reg, name);
    set_threadpool_fn *ours = set_threadpool;

    if (address != NULL && strcmp(name, "ggml_backend_cpu_set_threadpool") == 0)
        memcpy(&address, &ours, sizeof(address));
    return address;
}

static bool has_openmp(abi_reg *reg)
{
    void *symbol = host.get_proc_address(reg, "ggml_backend_get_features");
    const abi_feature *(*get_features)(abi_reg *);

    if (symbol == NULL)
        return false;
    memcpy(&get_features, &symbol, sizeof(get_features));
    for (const abi_feature *feature = get_features(reg); feature->name != NULL; feature++)
        if (strcmp(feature->name, "OPENMP") == 0)
            return true;
    return false;
}

static void watch(void)
{
    abi_device *cpu = kvp_api.dev_by_type != NULL ? kvp_api.dev_by_type(ABI_DEVICE_CPU) : NULL;
    abi_reg *reg = cpu != NULL && kvp_api.dev_backend_reg != NULL ? kvp_api.dev_backend_reg(cpu) : NULL;
    void *symbol;

    if (reg == NULL || reg->api_version != kvp_api.api || reg->iface.get_proc_address == NULL)
        return;
    symbol = reg->iface.get_proc_address(reg, "ggml_backend_cpu_set_threadpool");
    if (symbol == NULL)
        return;
    memcpy(&host.set_threadpool, &symbol, sizeof(symbol));
    host.get_proc_address = reg->iface.get_proc_address;
    host.openmp = has_openmp(reg);
    reg->iface.get_proc_address = get_proc_address;
}

void kvp_host_threads_watch(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, watch);
}

void kvp_host_threads_update(kvp_host_threads *threads)
{
    threads->lender = last_lender;
}

/* The node, on each of the lender's threads. */
static void run_node(abi_tensor *node, int thread, int n_threads, void *user)
{
    const kvp_host_threads *threads = user;

    (void)node;
    (void)n_threads;
    if ((uint32_t)thread < threads->n_workers)
        threads->work(threads->loop, (uint32_t)thread);
}

/* An abort callback may make the status one that stops llama.cpp; its next graph asks it again. */
static void run_loop(void *context, uint32_t n_workers, kvant_executor_work work, void *loop)
{
    kvp_host_threads *threads = context;

    threads->n_workers = n_workers;
    threads->work = work;
    threads->loop = loop;
    (void)kvp_api.graph_compute(threads->lender, threads->graph);
}

static bool build_graph(kvp_host_threads *threads)
{
    abi_init_params params = { .mem_size = 2 * kvp_api.tensor_overhead() + kvp_api.graph_overhead(),
                               .no_alloc = true };
    abi_tensor *node;

    if (threads->graph != NULL)
        return true;
    threads->context = kvp_api.init(params);
    if (threads->context == NULL)
        return false;
    node =
        kvp_api.custom_4d(threads->context, ABI_TYPE_F32, 1, 1, 1, 1, NULL, 0, run_node, ABI_N_TASKS_MAX, threads);
    threads->graph = kvp_api.new_graph(threads->context);
    kvp_api.build_forward_expand(threads->graph, node);
    threads->executor = (kvant_executor){ .run = run_loop, .context = threads };
    return true;
}

void kvp_host_threads_borrow(kvp_host_threads *threads)
{
    last_lender = NULL;
    threads->borrowed = threads->lender != NULL && build_graph(threads);
    if (threads->borrowed)
        threads->previous = kvant_use_executor(&threads->executor);
}

void kvp_host_threads_return(kvp_host_threads *threads)
{
    if (threads->borrowed)
        kvant_use_executor(threads->previous);
    threads->borrowed = false;
}

void kvp_host_threads_release(kvp_host_threads *threads)
{
    if (threads->context != NULL)
        kvp_api.free(threads->context);
    *threads = (kvp_host_threads){ 0 };
}
