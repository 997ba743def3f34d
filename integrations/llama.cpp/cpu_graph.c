/* cpu_graph.c - see cpu_graph.h.
 *
 * A run of nodes is kvant's nodes that follow each other. While a graph is computed, the last node
 * of a run is ggml's custom operation, and its other nodes are no operation. Kvant computes copies
 * of the nodes as they were. Every node on a cache that reaches a CPU back end is computed here,
 * whatever the scheduler was told, because ggml's own functions would read codes as f16. */
#include "cpu_graph.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "attributes.h"
#include "buffer.h"
#include "cpu_in_place.h"
#include "device.h"
#include "ggml_api.h"
#include "invalid.h"
#include "kv_layers.h"
#include "log.h"

/* A node is asked for twice this many nodes ahead, and its sources this many nodes ahead. Memory
 * takes about as long as a look at 8 nodes. Lines that are asked for too soon leave the cache. */
#define NODES_AHEAD 8

/* A cache is asked for this many runs ahead. In each of the three runs after that, the parts are
 * asked for to which the parts before them point (kvant_tensor_prefetch). */
#define AHEAD 4u

/* Nodes of ours that follow each other: copies number `first` to `first + n - 1`. Or the view
 * behind ggml's own attention to rows in place, at which queries are noted. */
struct run {
    const abi_tensor *node; /* the custom operation */
    size_t first, n;
    const abi_tensor *attention; /* NULL: kvant computes the nodes */
};

/* A CPU back end, and the graph that it computes. */
struct cpu {
    struct cpu *next;
    abi_backend *backend;
    abi_backend_iface inner;
    kvp_compute *compute; /* of the same context; NULL: none, or it was freed */
    abi_context *context;
    abi_tensor *custom; /* the operation that calls on_thread for this back end */
    kvp_cache_node *found;
    abi_tensor **nodes, *copies, **list;
    kvp_kv **caches; /* of the copies */
    struct run *runs;
    size_t n_found, n, most, n_runs; /* n: copies */
    int32_t status;
    bool prepares; /* kvant moves rows before a graph, with a graph of its own on this back end */
    atomic_uint n_graphs; /* ggml's threads read it before they read what graph_compute prepared */
};

static abi_device_iface inner; /* constant once ready is set */
static atomic_bool ready;
static pthread_mutex_t cpus_lock = PTHREAD_MUTEX_INITIALIZER;
static struct cpu *cpus;
static _Thread_local kvp_compute *expected;
static _Thread_local bool takes;

static struct cpu *cpu_of(const abi_backend *backend)
{
    struct cpu *cpu;

    pthread_mutex_lock(&cpus_lock);
    for (cpu = cpus; cpu != NULL && cpu->backend != backend; cpu = cpu->next)
        ;
    pthread_mutex_unlock(&cpus_lock);
    return cpu;
}

/* Which contexts */

void kvp_cpu_graph_begin(struct kvp_layers *layers)
{
    int paired = KVP_CPU_GRAPH_READY;

    if (layers != NULL)
        atomic_compare_exchange_strong(&layers->cpu_graph, &paired, KVP_CPU_GRAPH_ON);
}

/* The tensor's context; NULL: the tensor's cache is on another device, or is not placed yet. */
static struct kvp_layers *layers_of(const abi_tensor *cache)
{
    const abi_tensor *root = cache != NULL ? kvp_root(cache) : NULL;

    return root != NULL && root->buffer->buft == kvp_buft() && root->extra != NULL
               ? ((const kvp_kv *)root->extra)->layers
               : NULL;
}

void kvp_cpu_graph_note_size(const abi_tensor *node)
{
    if (node->op == kvp_api.op.flash_attn_ext && node->src[1] != NULL && kvp_is_kv(node->src[1]))
        kvp_cpu_graph_begin(layers_of(node->src[1]));
}

bool kvp_cpu_graph_takes(const abi_tensor *cache)
{
    struct kvp_layers *layers = layers_of(cache);

    takes = layers != NULL && atomic_load(&layers->cpu_graph) == KVP_CPU_GRAPH_ON;
    return takes;
}

void kvp_cpu_graph_end(const abi_tensor *cache)
{
    struct kvp_layers *layers = layers_of(cache);

    if (layers != NULL)
        atomic_store(&layers->cpu_graph, KVP_CPU_GRAPH_NEVER);
    takes = false;
}

/* Graphs */

static void fetch_all(const abi_tensor *tensor)
{
    for (size_t i = 0; i < offsetof(abi_tensor, name); i += 64)
        KVANT_PREFETCH((const char *)tensor + i);
}

/* Buffers without caches, in which most tensors of a graph are: the weights, and results. */
struct known {
    const abi_buffer *without[2];
    unsigned next;
};

static kvp_kv *cache_at(struct known *known, const abi_tensor *tensor)
{
    const abi_tensor *root = kvp_root(tensor);

    if (root->buffer == NULL || root->buffer == known->without[0] ||
        root->buffer == known->without[1])
        return NULL;
    if (root->buffer->buft == kvp_buft())
        return root->extra;
    known->without[known->next++ % 2] = root->buffer;
    return NULL;
}

/* The cache that a node writes to or reads; NULL: none in the memory of KVANT. */
static kvp_kv *cache_of(struct known *known, const abi_tensor *node)
{
    kvp_kv *kv = cache_at(known, node);

    for (int i = 0; i < ABI_MAX_SRC && kv == NULL; i++)
        if (node->src[i] != NULL)
            kv = cache_at(known, node->src[i]);
    return kv;
}

static bool has_room(struct cpu *cpu, size_t most)
{
    kvp_cache_node *found = realloc(cpu->found, most * sizeof(*found));
    abi_tensor **nodes = realloc(cpu->nodes, most * sizeof(*nodes));
    abi_tensor **list = realloc(cpu->list, most * sizeof(*list));
    kvp_kv **caches = realloc(cpu->caches, most * sizeof(*caches));
    abi_tensor *copies = realloc(cpu->copies, most * sizeof(*copies));
    struct run *runs = realloc(cpu->runs, most * sizeof(*runs));

    cpu->found = found != NULL ? found : cpu->found;
    cpu->nodes = nodes != NULL ? nodes : cpu->nodes;
    cpu->list = list != NULL ? list : cpu->list;
    cpu->caches = caches != NULL ? caches : cpu->caches;
    cpu->copies = copies != NULL ? copies : cpu->copies;
    cpu->runs = runs != NULL ? runs : cpu->runs;
    if (found == NULL || nodes == NULL || list == NULL || caches == NULL || copies == NULL ||
        runs == NULL)
        return false;
    cpu->most = most;
    return true;
}

/* The view of an attention node's result that the graph has before it computes something else. */
static abi_tensor *view_behind(abi_graph *graph, int i, const abi_tensor *node)
{
    const int n = kvp_api.graph_n_nodes(graph);
    abi_tensor *next = NULL;

    while (node->op == kvp_api.op.flash_attn_ext && ++i < n) {
        next = kvp_api.graph_node(graph, i);
        if (!kvp_is_view(next) || (next->src[0] == node && next->op != kvp_api.op.none))
            break;
    }
    return next != NULL && i < n && kvp_is_view(next) &&
                   (next->flags & ABI_TENSOR_FLAG_COMPUTE) != 0
               ? next
               : NULL;
}

/* Asks for what cache_of reads of a node that comes soon, and of the node's sources. Other nodes of
 * the model lie between two looks at a node, so it has left the caches. */
static void fetch_soon(abi_graph *graph, int i)
{
    const int n = kvp_api.graph_n_nodes(graph);

    if (i + 2 * NODES_AHEAD < n)
        fetch_all(kvp_api.graph_node(graph, i + 2 * NODES_AHEAD));
    if (i + NODES_AHEAD >= n)
        return;
    const abi_tensor *node = kvp_api.graph_node(graph, i + NODES_AHEAD);
    for (int j = 0; j < ABI_MAX_SRC && node->src[j] != NULL; j++) {
        KVANT_PREFETCH(&node->src[j]->buffer);
        KVANT_PREFETCH(&node->src[j]->view_src);
    }
}

/* Lists the graph's nodes of ours. False without memory. */
static bool find_nodes(struct cpu *cpu, abi_graph *graph)
{
    const int n = kvp_api.graph_n_nodes(graph);
    struct known known = { { NULL, NULL }, 0 };
    bool follows = false;

    cpu->n_found = 0;
    for (int i = 0; i < n; i++) {
        abi_tensor *node = kvp_api.graph_node(graph, i);
        fetch_soon(graph, i);
        kvp_kv *kv = kvp_is_computed(node) ? cache_of(&known, node) : NULL;
        if (kv == NULL) {
            follows = follows && !kvp_is_computed(node);
            continue;
        }
        if (cpu->n_found == cpu->most && !has_room(cpu, 2 * cpu->most + 64))
            return false;
        cpu->found[cpu->n_found++] = (kvp_cache_node){
            .node = node, .behind = view_behind(graph, i, node), .kv = kv, .follows = follows
        };
        follows = true;
    }
    return true;
}

/* Makes runs of the nodes that kvant computes. ggml computes nodes on rows in place. */
static void make_runs(struct cpu *cpu)
{
    bool follows = false;

    cpu->n = cpu->n_runs = 0;
    for (size_t i = 0; i < cpu->n_found; i++) {
        const kvp_cache_node *f = &cpu->found[i];
        const kvp_kv *kv = f->kv;
        const bool attends = f->node->op == kvp_api.op.flash_attn_ext;
        abi_tensor *node = !kv->in_place                          ? f->node
                           : attends && kvp_cpu_in_place_asks(kv) ? f->behind
                                                                  : NULL;
        follows = follows && f->follows && !kv->in_place;
        if (node != NULL && !follows)
            cpu->runs[cpu->n_runs++] =
                (struct run){ .first = cpu->n, .attention = kv->in_place ? f->node : NULL };
        follows = !kv->in_place;
        if (node == NULL)
            continue;
        cpu->runs[cpu->n_runs - 1].node = node;
        cpu->runs[cpu->n_runs - 1].n++;
        cpu->caches[cpu->n] = f->kv;
        cpu->nodes[cpu->n++] = node;
    }
}

/* Copies the nodes and puts the custom operation in their place. */
static void replace(struct cpu *cpu)
{
    for (size_t i = 0; i < cpu->n; i++) {
        cpu->copies[i] = *cpu->nodes[i];
        cpu->list[i] = &cpu->copies[i];
        cpu->nodes[i]->op = kvp_api.op.none;
    }
    for (size_t i = 0; i < cpu->n_runs; i++) {
        abi_tensor *last = cpu->nodes[cpu->runs[i].first + cpu->runs[i].n - 1];
        last->op = cpu->custom->op;
        memcpy(last->op_params, cpu->custom->op_params, sizeof(last->op_params));
    }
}

static void put_back(const struct cpu *cpu)
{
    for (size_t i = 0; i < cpu->n; i++) {
        cpu->nodes[i]->op = cpu->copies[i].op;
        memcpy(cpu->nodes[i]->op_params, cpu->copies[i].op_params,
               sizeof(cpu->copies[i].op_params));
    }
}

/* The work of the first thread of a run's node. */
struct job {
    struct cpu *cpu;
    const struct run *run;
};

/* The tensors that a node reads. */
static void fetch_inputs(const abi_tensor *node)
{
    for (int i = 0; i < ABI_MAX_SRC && node->src[i] != NULL; i++)
        fetch_all(node->src[i]);
}

/* Asks for the state of the layers that follow in the graph. Otherwise the first thread waits for
 * this state, while all other threads wait for the first thread. */
static void fetch_next(const struct cpu *cpu, const struct run *run)
{
    for (uint32_t ahead = 1; ahead <= AHEAD && ahead < cpu->n_runs - (size_t)(run - cpu->runs);
         ahead++)
        for (size_t i = run[ahead].first; i < run[ahead].first + run[ahead].n; i++) {
            if (ahead == AHEAD)
                KVANT_PREFETCH(&cpu->caches[i]->tensor);
            else if (i == run[ahead].first || cpu->caches[i] != cpu->caches[i - 1])
                kvant_tensor_prefetch(cpu->caches[i]->tensor, cpu->compute->held.slot, ahead);
            if (ahead == 1)
                fetch_inputs(&cpu->copies[i]);
        }
}

static void compute_run(void *user)
{
    const struct job *job = user;
    struct cpu *cpu = job->cpu;
    const int n = (int)job->run->n;
    abi_graph part = { .size = n, .n_nodes = n, .nodes = cpu->list + job->run->first };

    if (cpu->status != ABI_STATUS_SUCCESS)
        return;
    if (job->run->attention != NULL)
        kvp_cpu_in_place_note(cpu->compute, job->run->attention);
    else
        cpu->status = kvp_compute_cache_nodes(cpu->compute, &part);
    if (cpu->compute->held.rows[0].kv != NULL)
        fetch_next(cpu, job->run);
}

/* The custom operation, which each thread of the CPU back end calls. */
static void on_thread(abi_tensor *node, int thread, int n_threads, void *user)
{
    struct cpu *cpu = user;
    struct job job = { .cpu = cpu };

    atomic_load_explicit(&cpu->n_graphs, memory_order_acquire);
    job.run = cpu->runs;
    while (job.run->node != node)
        job.run++;
    kvp_host_threads_share(&job.cpu->compute->host_threads, (uint32_t)(job.run - job.cpu->runs),
                           (uint32_t)thread, (uint32_t)n_threads, compute_run, &job);
}

static bool has_custom(struct cpu *cpu)
{
    const abi_init_params params = { .mem_size = 2 * kvp_api.tensor_overhead(), .no_alloc = true };

    if (cpu->context == NULL)
        cpu->context = kvp_api.init(params);
    if (cpu->context != NULL && cpu->custom == NULL)
        cpu->custom = kvp_api.custom_4d(cpu->context, ABI_TYPE_F32, 1, 1, 1, 1, NULL, 0, on_thread,
                                        ABI_N_TASKS_MAX, cpu);
    return cpu->custom != NULL;
}

static int32_t compute_runs(struct cpu *cpu, abi_graph *graph)
{
    int32_t status;

    kvp_invalid_graph_begins();
    kvp_host_threads_begin(&cpu->compute->host_threads);
    cpu->status = ABI_STATUS_SUCCESS;
    replace(cpu);
    atomic_fetch_add_explicit(&cpu->n_graphs, 1, memory_order_release);
    status = cpu->inner.graph_compute(cpu->backend, graph);
    put_back(cpu);
    return status == ABI_STATUS_SUCCESS ? cpu->status : status;
}

static int32_t compute(struct cpu *cpu, abi_graph *graph)
{
    int32_t status;

    if (!find_nodes(cpu, graph) || (cpu->n_found > 0 && !has_custom(cpu)))
        return ABI_STATUS_ALLOC_FAILED;
    if (cpu->n_found == 0)
        return cpu->inner.graph_compute(cpu->backend, graph);
    if (cpu->compute == NULL) {
        kvp_error("%s: this CPU back end belongs to no context with a compressed cache; leave out "
                  "--device KVANT, and report the program",
                  cpu->found->node->name);
        return ABI_STATUS_FAILED;
    }
    cpu->prepares = true;
    status = kvp_cpu_in_place_prepare(cpu->compute, cpu->found, cpu->n_found);
    cpu->prepares = false;
    if (status != ABI_STATUS_SUCCESS)
        return status;
    make_runs(cpu);
    return cpu->n == 0 ? cpu->inner.graph_compute(cpu->backend, graph) : compute_runs(cpu, graph);
}

static int32_t graph_compute(abi_backend *backend, abi_graph *graph)
{
    struct cpu *cpu = cpu_of(backend);

    if (cpu == NULL) /* a copy of a back end */
        return ABI_STATUS_FAILED;
    if (cpu->prepares) /* the lists are the outer graph's */
        return cpu->inner.graph_compute(backend, graph);
    kvp_log_graph_begins();
    return kvp_log_graph_ends(compute(cpu, graph),
                              backend->device->iface.get_name(backend->device));
}

/* Life */

void kvp_cpu_graph_expect(kvp_compute *compute)
{
    expected = compute;
}

void kvp_cpu_graph_forget(const kvp_compute *compute)
{
    if (expected == compute)
        expected = NULL;
    pthread_mutex_lock(&cpus_lock);
    for (struct cpu *cpu = cpus; cpu != NULL; cpu = cpu->next)
        if (cpu->compute == compute)
            cpu->compute = NULL;
    pthread_mutex_unlock(&cpus_lock);
}

static void backend_free(abi_backend *backend)
{
    struct cpu **at = &cpus, *cpu;

    pthread_mutex_lock(&cpus_lock);
    while ((*at)->backend != backend)
        at = &(*at)->next;
    cpu = *at;
    *at = cpu->next;
    pthread_mutex_unlock(&cpus_lock);
    cpu->inner.free(backend);
    if (cpu->context != NULL)
        kvp_api.free(cpu->context);
    free(cpu->found);
    free(cpu->nodes);
    free(cpu->list);
    free(cpu->caches);
    free(cpu->copies);
    free(cpu->runs);
    free(cpu);
}

/* Takes over a back end. Without memory it stays as it is, and its context's nodes stay with
 * KVANT. */
static void take_over(abi_backend *backend)
{
    struct cpu *cpu = calloc(1, sizeof(*cpu));
    int alone = KVP_CPU_GRAPH_ALONE;

    if (cpu == NULL)
        return;
    *cpu = (struct cpu){ .backend = backend, .inner = backend->iface, .compute = expected };
    backend->iface.free = backend_free;
    backend->iface.graph_compute = graph_compute;
    pthread_mutex_lock(&cpus_lock);
    cpu->next = cpus;
    cpus = cpu;
    pthread_mutex_unlock(&cpus_lock);
    if (expected != NULL && expected->layers != NULL)
        atomic_compare_exchange_strong(&expected->layers->cpu_graph, &alone, KVP_CPU_GRAPH_READY);
    expected = NULL;
}

/* ggml reads the functions of a device without a barrier. So another thread may call the functions
 * below before the thread sees variables that were stored earlier. */
static const abi_device_iface *inner_iface(void)
{
    while (!atomic_load_explicit(&ready, memory_order_acquire))
        ;
    return &inner;
}

static abi_backend *init_backend(abi_device *device, const char *params)
{
    abi_backend *backend = inner_iface()->init_backend(device, params);

    if (backend != NULL)
        take_over(backend);
    return backend;
}

static bool supports_op(abi_device *device, const abi_tensor *op)
{
    const abi_tensor *cache = kvp_cache_tensor_of(op);

    if (cache != NULL && kvp_cpu_graph_takes(cache)) {
        if (kvp_cache_supports(op))
            return true;
        kvp_cpu_graph_end(cache);
    }
    return inner_iface()->supports_op(device, op);
}

static bool supports_buft(abi_device *device, abi_buft *buft)
{
    return (takes && buft == kvp_buft()) || inner_iface()->supports_buft(device, buft);
}

static void watch(void)
{
    abi_device *cpu = kvp_api.dev_by_type != NULL ? kvp_api.dev_by_type(ABI_DEVICE_CPU) : NULL;

    if (cpu == NULL)
        return;
    inner = cpu->iface;
    atomic_store_explicit(&ready, true, memory_order_release);
    cpu->iface.init_backend = init_backend;
    cpu->iface.supports_op = supports_op;
    cpu->iface.supports_buft = supports_buft;
}

void kvp_cpu_graph_use(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, watch);
}
