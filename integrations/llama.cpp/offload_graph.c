/* offload_graph.c - see offload_graph.h.
 *
 * A graph is cut at the nodes that touch caches. The device's own back end computes the parts
 * between them. For a node on a cache, its sources are copied to the computer's memory, kvant
 * computes it there, and its result is copied to the device. A token's rows are small; a mask is
 * copied once per graph, because all layers read it. */
#include "offload_graph.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "device.h"
#include "ggml_api.h"
#include "invalid.h"
#include "log.h"
#include "kv_tensor.h"

/* kvant's nodes that are computed together: SET_ROWS of keys and values, and attention. A longer
 * row of nodes is cut. */
#define MAX_NODES 8

/* Memory that is 8 times as large as a copy and this together goes back to the system. So a long
 * prompt's mask keeps no megabytes while single tokens follow. With a smaller number, the memory of
 * a token's rows would be allocated again and again. */
#define KEPT_COPY ((size_t)128 << 10)

/* Host memory for the copy of a tensor. */
struct copy {
    const abi_tensor *of;
    void *at;
    size_t bytes;
};

/* Copies whose memory is used again for other tensors. */
struct copies {
    struct copy *at;
    size_t n, most;
};

struct state {
    struct state *next;
    abi_backend *backend;
    abi_backend_iface inner;
    kvp_compute *compute;
    struct copies kept, /* of the graph: masks, cell numbers, positions */
        rows;           /* of the nodes that are computed together */
    /* Copies of the nodes, and of the tensors that they read, whose data is in host memory. */
    struct {
        abi_tensor node, src[ABI_MAX_SRC];
    } nodes[MAX_NODES];
};

static pthread_mutex_t states_lock = PTHREAD_MUTEX_INITIALIZER;
static struct state *states;
/* The layers of the newest back end. A context has one back end for each device, and its caches
 * belong to the last of them. */
static _Atomic(const struct kvp_layers *) newest;

static struct state *state_of(const abi_backend *backend)
{
    struct state *s;

    pthread_mutex_lock(&states_lock);
    for (s = states; s != NULL && s->backend != backend; s = s->next)
        ;
    pthread_mutex_unlock(&states_lock);
    return s;
}

static bool is_ours(const abi_tensor *node)
{
    return kvp_is_computed(node) && kvp_cache_tensor_of(node) != NULL;
}

/* Copies */

static struct copy *new_copy(struct copies *copies, const abi_tensor *of, size_t bytes)
{
    struct copy *copy;

    if (copies->n == copies->most) {
        const size_t most = 2 * copies->most + 8;
        struct copy *at = realloc(copies->at, most * sizeof(*at));
        if (at == NULL)
            return NULL;
        memset(at + copies->most, 0, (most - copies->most) * sizeof(*at));
        copies->at = at;
        copies->most = most;
    }
    copy = &copies->at[copies->n];
    if (copy->at == NULL || copy->bytes < bytes || copy->bytes / 8 > bytes + KEPT_COPY) {
        free(copy->at);
        copy->at = malloc(bytes > 0 ? bytes : 1);
        copy->bytes = copy->at != NULL ? bytes : 0;
    }
    if (copy->at == NULL)
        return NULL;
    copy->of = of;
    copies->n++;
    return copy;
}

static void free_copies(struct copies *copies)
{
    for (size_t i = 0; i < copies->most; i++)
        free(copies->at[i].at);
    free(copies->at);
}

/* The tensor's data in the computer's memory; NULL without memory. The device has finished its
 * work. */
static void *fetch(struct copies *copies, const abi_tensor *tensor)
{
    abi_buffer *buffer = kvp_root(tensor)->buffer;
    const size_t bytes = kvp_api.nbytes(tensor);
    struct copy *copy;

    if (kvp_api.buft_is_host(buffer->buft))
        return tensor->data;
    for (size_t i = 0; i < copies->n; i++)
        if (copies->at[i].of == tensor)
            return copies->at[i].at;
    copy = new_copy(copies, tensor, bytes);
    if (copy != NULL)
        buffer->iface.get_tensor(buffer, tensor, copy->at, 0, bytes);
    return copy != NULL ? copy->at : NULL;
}

static const int32_t *read_positions(void *user, const abi_tensor *positions)
{
    return fetch(&((struct state *)user)->kept, positions);
}

/* Whether other layers read this source of a node, too. */
static bool is_shared(const abi_tensor *node, int src)
{
    return node->op == kvp_api.op.flash_attn_ext ? src >= 3 : src >= 1;
}

/* Makes copy number i of a node. */
static abi_tensor *copy_node(struct state *s, int i, const abi_tensor *node)
{
    abi_tensor *copy = &s->nodes[i].node;

    *copy = *node;
    for (int j = 0; j < ABI_MAX_SRC; j++) {
        abi_tensor *src = &s->nodes[i].src[j];
        if (node->src[j] == NULL || kvp_is_kv(node->src[j]))
            continue;
        *src = *node->src[j];
        src->data = fetch(is_shared(node, j) ? &s->kept : &s->rows, node->src[j]);
        if (src->data == NULL)
            return NULL;
        copy->src[j] = src;
    }
    if (!kvp_is_kv(node)) {
        const struct copy *result = new_copy(&s->rows, node, kvp_api.nbytes(node));
        copy->data = result != NULL ? result->at : NULL;
    }
    return copy->data != NULL ? copy : NULL;
}

/* Parts of a graph */

static int32_t by_kvant(struct state *s, abi_tensor *const *nodes, int n)
{
    abi_tensor *copies[MAX_NODES];
    abi_graph part = { .size = n, .n_nodes = n, .nodes = copies };
    int32_t status;

    s->rows.n = 0;
    if (s->inner.synchronize != NULL)
        s->inner.synchronize(s->backend);
    for (int i = 0; i < n; i++)
        if ((copies[i] = copy_node(s, i, nodes[i])) == NULL)
            return ABI_STATUS_ALLOC_FAILED;
    status = kvp_compute_cache_graph(s->compute, &part);
    for (int i = 0; i < n && status == ABI_STATUS_SUCCESS; i++) {
        abi_buffer *buffer = kvp_root(nodes[i])->buffer;
        if (!kvp_is_kv(nodes[i]))
            buffer->iface.set_tensor(buffer, nodes[i], copies[i]->data, 0,
                                     kvp_api.nbytes(nodes[i]));
    }
    return status;
}

static int32_t by_device(const struct state *s, const abi_graph *graph, int begin, int end)
{
    abi_graph part = kvp_graph_part(graph, begin, end);

    return kvp_has_only_views(&part) ? ABI_STATUS_SUCCESS
                                     : s->inner.graph_compute(s->backend, &part);
}

/* The number of the first node from `begin` on that is ours; n_nodes: none is. */
static int find_ours(const abi_graph *graph, int begin)
{
    while (begin < graph->n_nodes && !is_ours(graph->nodes[begin]))
        begin++;
    return begin;
}

/* Collects nodes of ours from number *i on, which becomes the number of the node behind them. Views
 * are skipped. A node whose result is no cache is the last, because the next node may read it. */
static int collect_ours(const abi_graph *graph, int *i, abi_tensor **nodes)
{
    int n = 0;
    bool last = false;

    for (; *i < graph->n_nodes && n < MAX_NODES && !last; (*i)++) {
        abi_tensor *node = graph->nodes[*i];
        if (is_ours(node))
            nodes[n++] = node;
        else if (!kvp_is_view(node))
            break;
        last = n > 0 && nodes[n - 1] == node && !kvp_is_kv(node);
    }
    return n;
}

static int32_t backend_graph_compute(abi_backend *backend, abi_graph *graph)
{
    struct state *s = state_of(backend);
    int32_t status = ABI_STATUS_SUCCESS;
    int begin = 0, i = find_ours(graph, 0);

    if (i == graph->n_nodes)
        return s->inner.graph_compute(backend, graph);
    kvp_invalid_graph_begins();
    kvp_log_graph_begins();
    s->kept.n = 0;
    while (begin < graph->n_nodes && status == ABI_STATUS_SUCCESS) {
        abi_tensor *nodes[MAX_NODES];
        status = by_device(s, graph, begin, i);
        if (i < graph->n_nodes && status == ABI_STATUS_SUCCESS) {
            const int n = collect_ours(graph, &i, nodes);
            status = by_kvant(s, nodes, n);
        }
        begin = i;
        i = find_ours(graph, i);
    }
    return kvp_log_graph_ends(status, backend->device->iface.get_name(backend->device));
}

/* The device may change the order of nodes between two nodes of ours. */
static void backend_graph_optimize(abi_backend *backend, abi_graph *graph, void *params)
{
    struct state *s = state_of(backend);

    for (int begin = 0, i; begin < graph->n_nodes; begin = i + 1) {
        i = find_ours(graph, begin);
        abi_graph part = kvp_graph_part(graph, begin, i);
        if (i > begin)
            s->inner.graph_optimize(backend, &part, params);
    }
}

void kvp_offload_set_n_threads(abi_backend *backend, int n_threads)
{
    struct state *s = state_of(backend);

    if (s == NULL)
        return;
    if (atomic_load(&newest) == s->compute->layers)
        kvp_kv_context_check(s->compute->layers);
    kvp_compute_set_n_threads(s->compute, n_threads);
}

/* Life */

static void remove_from_list(const struct state *s)
{
    struct state **at;

    pthread_mutex_lock(&states_lock);
    for (at = &states; *at != s; at = &(*at)->next)
        ;
    *at = s->next;
    pthread_mutex_unlock(&states_lock);
}

static void backend_free(abi_backend *backend)
{
    struct state *s = state_of(backend);
    void (*inner_free)(abi_backend *) = s->inner.free;

    remove_from_list(s);
    kvp_compute_free(s->compute);
    free_copies(&s->kept);
    free_copies(&s->rows);
    free(s);
    inner_free(backend);
}

static void take_over(struct state *s)
{
    abi_backend_iface *iface = &s->backend->iface;

    s->inner = *iface;
    iface->free = backend_free;
    iface->graph_compute = backend_graph_compute;
    if (iface->graph_optimize != NULL)
        iface->graph_optimize = backend_graph_optimize;
    s->compute->read_positions = read_positions;
    s->compute->reader = s;
    atomic_store(&newest, s->compute->layers);
    pthread_mutex_lock(&states_lock);
    s->next = states;
    states = s;
    pthread_mutex_unlock(&states_lock);
}

abi_backend *kvp_offload_backend(abi_device *device,
                                 abi_backend *(*init)(abi_device *device, const char *params),
                                 const char *params)
{
    struct state *s = calloc(1, sizeof(*s));

    if (s == NULL || (s->compute = kvp_compute_create_for_cache()) == NULL) {
        free(s);
        return NULL;
    }
    kvp_kv_note_elsewhere(); /* ggml does not ask a GPU about nodes in the computer's memory */
    s->backend = init(device, params);
    if (s->backend == NULL) {
        kvp_compute_free(s->compute);
        free(s);
        return NULL;
    }
    take_over(s);
    return s->backend;
}
