/* backend.c - back ends of gpu.h: instances of CUDA's, with graph_compute and free replaced.
 *
 * A graph is cut at nodes of ours. ggml-cuda computes the parts on its stream, and libkvant_cuda
 * computes our nodes on our stream; events order the two. When llama.cpp computes a graph of a few
 * tokens again (same uid), it is captured on both streams as one CUDA graph, which is launched from
 * then on.
 *
 * ggml-cuda would begin its own capture inside this one. A node in front of each part, whose
 * parameters change every time, prevents that. The first time a graph is computed without capture,
 * so that both sides allocate their memory. */
#include "gpu.h"
#include "in_place.h"
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

/* With more tokens, ggml-cuda's MUL_MAT_ID may wait on the host, which a capture does not allow. */
#define MOST_CAPTURED_EXPERT_TOKENS 4

static kvp_gpu_backend *state_of(abi_backend *backend)
{
    kvp_gpu *gpu = kvp_gpu_of(backend->device);
    kvp_gpu_backend *b;

    pthread_mutex_lock(&gpu->list_lock);
    for (b = gpu->backends; b != NULL && b->backend != backend; b = b->next)
        ;
    pthread_mutex_unlock(&gpu->list_lock);
    return b;
}

void kvp_gpu_finish(kvp_gpu *gpu, const void *context)
{
    pthread_mutex_lock(&gpu->lock);
    kvp_cu_finish(gpu->stream, "waiting for work");
    pthread_mutex_lock(&gpu->list_lock);
    for (kvp_gpu_backend *b = gpu->backends; b != NULL; b = b->next)
        if (context != NULL && b->context == context)
            b->inner.synchronize(b->backend);
    pthread_mutex_unlock(&gpu->list_lock);
    pthread_mutex_unlock(&gpu->lock);
}

/* Streams */

static void to_ours(kvp_gpu_backend *b)
{
    if (b->on_ours)
        return;
    b->inner.event_record(b->backend, &b->to_us_event);
    kvp_cu_ok(kvp_cu.stream_wait(b->gpu->stream, b->to_us, 0), "ordering streams");
    b->on_ours = true;
    b->attended_since = false;
}

void kvp_gpu_follow(kvp_gpu_backend *b)
{
    to_ours(b);
}

static void to_cuda(kvp_gpu_backend *b)
{
    if (!b->on_ours)
        return;
    kvp_cu_ok(kvp_cu.event_record(b->to_cuda, b->gpu->stream), "ordering streams");
    b->inner.event_wait(b->backend, &b->to_cuda_event);
    b->on_ours = false;
}

/* Parts */

bool kvp_gpu_is_ours(const abi_tensor *node)
{
    return kvp_is_computed(node) &&
           ((kvp_cache_tensor_of(node) != NULL && !kvp_gpu_in_place_uses(node)) ||
            kvp_gpu_accelerates(node));
}

/* A uid for a part of a graph that has a uid, so that ggml-cuda need not compare nodes. Graphs
 * whose queries are kept are cut at other nodes, and their parts have no uid. */
static uint64_t part_uid(kvp_gpu_backend *b, const abi_graph *graph, int part)
{
    if (graph->uid == 0 || b->query_cache != NULL || kvp_api.graph_next_uid == NULL)
        return 0;
    if (part >= b->n_part_uids) {
        const int n = 2 * part + 64;
        uint64_t *uids = realloc(b->part_uids, (size_t)n * sizeof(*uids));
        if (uids == NULL)
            return 0;
        memset(uids + b->n_part_uids, 0, (size_t)(n - b->n_part_uids) * sizeof(*uids));
        b->part_uids = uids;
        b->n_part_uids = n;
    }
    if (b->part_uids[part] == 0)
        b->part_uids[part] = kvp_api.graph_next_uid();
    return b->part_uids[part];
}

/* Puts the front node before the nodes of a part. */
static bool put_front(kvp_gpu_backend *b, abi_graph *part)
{
    if (b->n_nodes < part->n_nodes + 1) {
        abi_tensor **nodes = realloc(b->nodes, ((size_t)part->n_nodes + 1) * sizeof(*nodes));
        if (nodes == NULL)
            return false;
        b->nodes = nodes;
        b->n_nodes = part->n_nodes + 1;
    }
    b->front.op_params[0]++;
    b->nodes[0] = &b->front;
    memcpy(b->nodes + 1, part->nodes, (size_t)part->n_nodes * sizeof(*b->nodes));
    part->nodes = b->nodes;
    part->n_nodes++;
    part->uid = 0;
    return true;
}

/* Compresses rows or pages of the next layer while CUDA computes a part. The rows are from graphs
 * before, so they need not wait for the part. */
static bool seal_ahead(const kvp_gpu_backend *b)
{
    bool ok = true;

    for (kvp_gpu_cache *cache = b->gpu->caches; cache != NULL && ok; cache = cache->next)
        ok = kvp_gpu_first_next(cache);
    return ok;
}

static int32_t by_cuda(kvp_gpu_backend *b, const abi_graph *graph, int begin, int end, uint64_t uid,
                       bool capturing)
{
    abi_graph part = kvp_graph_part(graph, begin, end);
    int32_t status;

    if (kvp_has_only_views(&part))
        return ABI_STATUS_SUCCESS;
    part.uid = uid;
    if (capturing && !put_front(b, &part))
        return ABI_STATUS_ALLOC_FAILED;
    to_cuda(b);
    b->n_parts++;
    status = b->inner.graph_compute(b->backend, &part);
    return seal_ahead(b) ? status : ABI_STATUS_FAILED;
}

/* The next node after number *i that computes something, or NULL. */
static abi_tensor *next_computed(const abi_graph *graph, int *i)
{
    for ((*i)++; *i < graph->n_nodes; (*i)++)
        if (kvp_is_computed(graph->nodes[*i]))
            return graph->nodes[*i];
    return NULL;
}

/* Computes node *i. If the next nodes are the values of the same layer and attention over both,
 * computes them with it. *i becomes the last computed node's number. */
static int32_t by_us(kvp_gpu_backend *b, const abi_graph *graph, int *i)
{
    abi_tensor *node = graph->nodes[*i], *values = NULL, *attending = NULL;
    int behind = *i;

    if (node->op == kvp_api.op.set_rows)
        values = next_computed(graph, &behind);
    if (values != NULL && !kvp_gpu_pairs(node, values))
        values = NULL;
    if (values != NULL) {
        *i = behind;
        attending = next_computed(graph, &behind);
        if (attending != NULL && kvp_gpu_attends(node, values, attending))
            *i = behind;
        else
            attending = NULL;
    }
    to_ours(b);
    return kvp_gpu_compute(b, node, values, attending);
}

/* Keeps the queries of a node, and takes the layer's lesson if it is time; CUDA computes the node
 * itself. */
static int32_t ask(kvp_gpu_backend *b, const abi_tensor *node)
{
    to_ours(b);
    if (!kvp_gpu_queries_keep(b, node))
        return ABI_STATUS_ALLOC_FAILED;
    kvp_gpu_in_place_teach(b, node);
    return ABI_STATUS_SUCCESS;
}

static int32_t by_parts(kvp_gpu_backend *b, const abi_graph *graph, bool capturing)
{
    int32_t status = ABI_STATUS_SUCCESS;
    int begin = 0, part = 0;

    for (int i = 0; i <= graph->n_nodes && status == ABI_STATUS_SUCCESS; i++) {
        const bool keeps_queries =
            i < graph->n_nodes && kvp_gpu_in_place_keeps_queries(b, graph->nodes[i]);
        if (i < graph->n_nodes && !keeps_queries && !kvp_gpu_is_ours(graph->nodes[i]))
            continue;
        status = by_cuda(b, graph, begin, i, part_uid(b, graph, part++), capturing);
        if (keeps_queries && status == ABI_STATUS_SUCCESS)
            status = ask(b, graph->nodes[i]);
        else if (i < graph->n_nodes && status == ABI_STATUS_SUCCESS)
            status = by_us(b, graph, &i);
        begin = keeps_queries ? i : i + 1;
    }
    return status;
}

/* Capturing */

static bool waits_on_host(const abi_tensor *node)
{
    const int32_t type = node->op == kvp_api.op.mul_mat_id ? node->src[0]->type : 0;

    return node->op == kvp_api.op.mul_mat_id &&
           (node->ne[2] > MOST_CAPTURED_EXPERT_TOKENS || type == ABI_TYPE_F32 ||
            type == ABI_TYPE_F16 || type == ABI_TYPE_BF16);
}

static bool may_capture(const abi_graph *graph)
{
    for (int i = 0; i < graph->n_nodes; i++) {
        const abi_tensor *node = graph->nodes[i];
        if (waits_on_host(node) ||
            (node->op == kvp_api.op.flash_attn_ext &&
             node->src[0]->ne[1] * node->src[0]->ne[3] > KVP_SHORT_STEP_TOKENS) ||
            (kvp_gpu_is_ours(node) && !kvp_gpu_capturable(node)))
            return false;
    }
    return true;
}

/* Makes b->exec from a captured graph. */
static bool make_exec(kvp_gpu_backend *b, cu_graph graph)
{
    cu_update_info info;

    if (b->exec != NULL && kvp_cu.graph_update(b->exec, graph, &info) == 0)
        return true;
    if (b->exec != NULL)
        kvp_cu.exec_free(b->exec);
    b->exec = NULL;
    return kvp_cu_ok(kvp_cu.graph_make(&b->exec, graph, 0), "building a graph");
}

static bool capture(kvp_gpu_backend *b, const abi_graph *graph)
{
    cu_graph captured = NULL;
    int32_t status;
    bool made;

    to_cuda(b); /* work before the graph is not captured */
    if (!kvp_cu_ok(kvp_cu.capture_begin(b->gpu->stream, CU_CAPTURE_RELAXED), "capturing a graph"))
        return false;
    /* CUDA's stream joins the capture with the first change of streams, and returns with the
     * last */
    b->on_ours = true;
    status = by_parts(b, graph, true);
    to_ours(b);
    b->on_ours = false; /* the capture itself computed nothing */
    if (!kvp_cu_ok(kvp_cu.capture_end(b->gpu->stream, &captured), "capturing a graph") ||
        captured == NULL)
        return false;
    b->n_captures++;
    made = status == ABI_STATUS_SUCCESS && kvp_gpu_straighten(captured) && make_exec(b, captured);
    kvp_cu.graph_free(captured);
    return made;
}

static int32_t launch(kvp_gpu_backend *b)
{
    bool launched;

    to_ours(b);
    launched = kvp_cu_ok(kvp_cu.graph_launch(b->exec, b->gpu->stream), "launching a graph");
    to_cuda(b);
    b->n_launches++;
    return launched ? ABI_STATUS_SUCCESS : ABI_STATUS_FAILED;
}

static bool has_ours(const abi_graph *graph)
{
    for (int i = 0; i < graph->n_nodes; i++)
        if (kvp_gpu_is_ours(graph->nodes[i]))
            return true;
    return false;
}

/* Whether a graph that in_place.c knows has nodes of ours. The answer is kept, because a token in
 * place takes 3 % longer on an H200 when each graph is examined again. */
static bool is_partly_ours(kvp_gpu_backend *b, const abi_graph *graph)
{
    struct kvp_gpu_uses *uses = &b->uses;

    if (uses->uid == 0 || uses->ours_uid != uses->uid || uses->ours_forms != b->forms)
        uses->ours = has_ours(graph);
    uses->ours_uid = uses->uid;
    uses->ours_forms = b->forms;
    return uses->ours;
}

static int32_t by_cuda_alone(kvp_gpu_backend *b, abi_graph *graph)
{
    to_cuda(b);
    if (b->query_cache == NULL)
        return b->inner.graph_compute(b->backend, graph);
    return by_parts(b, graph, false);
}

static int32_t compute_graph(kvp_gpu_backend *b, abi_graph *graph)
{
    unsigned epoch;
    bool known, waits;

    b->looked = b->monotonous = false;
    b->graph = graph;
    b->query_cache = NULL;
    b->kept_exact = NULL;
    if (kvp_gpu_in_place_any(b->gpu)) {
        kvp_gpu_find_positions(b, graph);
        if (!kvp_gpu_in_place_prepare(b, graph))
            return ABI_STATUS_ALLOC_FAILED;
        if (!is_partly_ours(b, graph))
            return by_cuda_alone(b, graph);
    }
    known = graph->uid != 0 && graph->uid == b->uid && b->forms == b->looked_forms;
    b->looked_forms = b->forms;
    if ((!known && !kvp_gpu_look_at(b, graph)) || !kvp_gpu_prepare(b, &waits))
        return ABI_STATUS_FAILED;
    epoch = atomic_load(&b->gpu->epoch);
    if (b->epoch != epoch || !known || b->all_pending != waits || b->masks_changed)
        b->captured = false;
    b->masks_changed = false;
    b->epoch = epoch;
    b->all_pending = waits;
    if (!known && b->part_uids != NULL)
        memset(b->part_uids, 0, (size_t)b->n_part_uids * sizeof(*b->part_uids));
    b->uid = graph->uid;
    if (known && !b->captured && b->graphs && waits && may_capture(graph)) {
        b->captured = capture(b, graph);
        b->graphs = b->captured; /* if capturing failed, the graph is computed in parts */
    }
    if (b->captured)
        return launch(b);
    return by_parts(b, graph, false);
}

/* Enqueues the lessons that a graph took. The program that waits for the graph does not wait for
 * them, so the GPU learns while the program prepares its next graph. */
static void enqueue_lessons(kvp_gpu_backend *b)
{
    for (kvp_gpu_cache *cache = b->gpu->caches; cache != NULL; cache = cache->next)
        if (kvp_gpu_learner_waits(cache)) {
            to_ours(b);
            kvp_gpu_learner_flush(cache);
        }
}

/* Layers that the graph did not reach get their transforms after it. CUDA's stream waits for this
 * work and for the graph's, because a program waits for CUDA's stream before kvant frees memory
 * that the work reads. The next graph waits for lessons, whose rows it may overwrite. */
static int32_t compute(kvp_gpu_backend *b, abi_graph *graph)
{
    to_cuda(b);
    kvp_gpu_forget_expanded(b->gpu);
    const int32_t status = compute_graph(b, graph);
    bool ok = status != ABI_STATUS_SUCCESS || !kvp_gpu_in_place_any(b->gpu) ||
              kvp_gpu_in_place_end_graph(b, graph);

    for (kvp_gpu_cache *cache = b->gpu->caches; cache != NULL; cache = cache->next) {
        if (cache->late.any)
            to_ours(b);
        ok = kvp_gpu_first_finish(cache) && ok;
        if (kvp_gpu_queries_unneeded(cache))
            atomic_store(&b->gpu->hands_over, true);
    }
    kvp_gpu_forget_expanded(b->gpu);
    to_cuda(b);
    enqueue_lessons(b);
    return ok ? status : ABI_STATUS_FAILED;
}

/* Reads which rows kernels refused (a NaN) in graphs that are done. The computer does not wait for
 * that, because attention looks at the marks of kernels, whether the computer knows of them or
 * not. */
static void notice_refusals(kvp_gpu_backend *b)
{
    const kvant_status status = kvp_gpu_read_word(b->refused);

    if (kvp_gpu_read_word(b->gpu->unsealed) != KVANT_OK)
        kvp_error("%s: rows could not be compressed, because the length of a row is more than "
                  "65504; answers that see them are wrong: set KVANT_K=f16 KVANT_V=f16",
                  b->gpu->name);
    if (status == KVANT_OK || !kvp_gpu_enter(b->gpu))
        return;
    pthread_mutex_lock(&b->gpu->lock);
    kvp_gpu_marks_notice_all(b->gpu, status);
    pthread_mutex_unlock(&b->gpu->lock);
}

/* Does the same for rows that a hand-over stored. Frees the memory that it needed, and the queries
 * that first key transforms were learned from. Other contexts may hold the lock for long, so it is
 * taken only if there is something to do. */
static void end_hand_overs(kvp_gpu *gpu)
{
    if (!atomic_load(&gpu->hands_over) || !kvp_gpu_enter(gpu))
        return;
    pthread_mutex_lock(&gpu->lock);
    kvp_cu_finish(gpu->stream, "waiting for work"); /* of all contexts */
    atomic_store(&gpu->hands_over, false);
    for (kvp_gpu_cache *cache = gpu->caches; cache != NULL; cache = cache->next) {
        kvp_gpu_hand_over_end(cache);
        if (kvp_gpu_queries_unneeded(cache))
            kvp_gpu_queries_free(cache);
    }
    pthread_mutex_unlock(&gpu->lock);
}

static void backend_synchronize(abi_backend *backend)
{
    kvp_gpu_backend *b = state_of(backend);

    b->inner.synchronize(backend);
    if (!b->captured && kvp_gpu_enter(b->gpu)) { /* no work that uses former sizes is left */
        kvp_gpu_release_former(&b->workspace);
        kvp_gpu_release_former(&b->queries);
        kvp_gpu_release_former(&b->centered);
        kvp_gpu_release_former(&b->offsets);
    }
    end_hand_overs(b->gpu);
    notice_refusals(b);
}

static int32_t backend_graph_compute(abi_backend *backend, abi_graph *graph)
{
    kvp_gpu_backend *b = state_of(backend);
    bool ours = false;
    int32_t status;

    notice_refusals(b);
    kvp_invalid_graph_begins();
    kvp_log_graph_begins();
    for (int i = 0; i < graph->n_nodes && !ours; i++)
        ours = kvp_gpu_is_ours(graph->nodes[i]) || kvp_gpu_in_place_uses(graph->nodes[i]);
    if (!ours) { /* with cb_eval each node is a graph, and only RoPE's graph has the positions */
        kvp_gpu_find_positions(b, graph);
        return b->inner.graph_compute(backend, graph);
    }
    b->n_graphs++;
    kvp_kv_context_check(b->layers);
    pthread_mutex_lock(&b->gpu->lock);
    status = kvp_gpu_enter(b->gpu) ? compute(b, graph) : ABI_STATUS_FAILED;
    pthread_mutex_unlock(&b->gpu->lock);
    return kvp_log_graph_ends(status, b->gpu->name);
}

/* Life */

static void remove_from_list(kvp_gpu_backend *b)
{
    kvp_gpu_backend **at;

    pthread_mutex_lock(&b->gpu->list_lock);
    for (at = &b->gpu->backends; *at != NULL && *at != b; at = &(*at)->next)
        ;
    if (*at != NULL)
        *at = b->next;
    pthread_mutex_unlock(&b->gpu->list_lock);
}

static void release(kvp_gpu_backend *b)
{
    if (b->exec != NULL)
        kvp_cu.exec_free(b->exec);
    if (b->to_us != NULL)
        kvp_cu.event_free(b->to_us);
    if (b->to_cuda != NULL)
        kvp_cu.event_free(b->to_cuda);
    kvp_gpu_release(&b->workspace);
    kvp_gpu_release(&b->queries);
    kvp_gpu_release(&b->centered);
    kvp_gpu_release(&b->offsets);
    kvp_gpu_release(&b->lengths);
    if (b->refused != NULL)
        kvp_cu.host_memory_free(b->refused);
    if (b->compute.cpu != NULL)
        kvp_api.backend_free(b->compute.cpu);
    free(b->nodes);
    free(b->part_uids);
    kvp_gpu_fetch_release(b);
    kvp_kv_context_release(b->layers);
    free(b);
}

static void backend_free(abi_backend *backend)
{
    kvp_gpu_backend *b = state_of(backend);
    void (*inner_free)(abi_backend *) = b->inner.free;

    kvp_note("%s: %lu graphs in %lu parts, %lu captures, %lu launches", b->gpu->name, b->n_graphs,
             b->n_parts, b->n_captures, b->n_launches);
    if (kvp_gpu_enter(b->gpu))
        kvp_gpu_finish(b->gpu, b->context);
    remove_from_list(b);
    if (b->gpu->backends == NULL && kvp_gpu_enter(b->gpu)) {
        kvp_gpu_copying_release(b->gpu);
        kvp_gpu_forget_inputs(b->gpu);
        kvp_gpu_release(&b->gpu->batch);
        kvp_gpu_release(&b->gpu->staging);
    }
    release(b);
    inner_free(backend);
}

static bool start(kvp_gpu_backend *b)
{
    kvp_gpu *gpu = b->gpu;

    if (b->inner.event_record == NULL || b->inner.event_wait == NULL ||
        b->inner.synchronize == NULL || !kvp_gpu_enter(gpu) ||
        !kvp_cu_ok(kvp_cu.event_new(&b->to_us, CU_NO_TIMING), "creating an event") ||
        !kvp_cu_ok(kvp_cu.event_new(&b->to_cuda, CU_NO_TIMING), "creating an event") ||
        (b->refused = kvp_gpu_new_word()) == NULL)
        return false;
    b->to_us_event = (abi_event){ gpu->inner, b->to_us };
    b->to_cuda_event = (abi_event){ gpu->inner, b->to_cuda };
    b->front = (abi_tensor){
        .type = ABI_TYPE_F32, .ne = { 1, 1, 1, 1 }, .op = kvp_api.op.none, .name = "kvant"
    };
    return true;
}

/* llama.cpp creates a back end for each GPU and then the caches, which belong to the last back end.
 * So the thread's context is that of this back end's llama context, unless it has this GPU, too. */
static void note_other_gpus(kvp_gpu *gpu)
{
    struct kvp_layers *layers = kvp_kv_context();
    const kvp_gpu_backend *at;

    pthread_mutex_lock(&gpu->list_lock);
    for (at = gpu->backends; at != NULL && at->layers != layers; at = at->next)
        ;
    pthread_mutex_unlock(&gpu->list_lock);
    if (at == NULL)
        kvp_kv_context_follows(layers);
    kvp_kv_context_release(layers);
}

/* Replaces functions of CUDA's instance. */
static void take_over(kvp_gpu_backend *b, abi_device *device)
{
    b->backend->device = device;
    b->backend->iface.graph_compute = backend_graph_compute;
    b->backend->iface.synchronize = backend_synchronize;
    b->backend->iface.free = backend_free;
    pthread_mutex_lock(&b->gpu->list_lock);
    b->next = b->gpu->backends;
    b->gpu->backends = b;
    pthread_mutex_unlock(&b->gpu->list_lock);
}

abi_backend *kvp_gpu_init_backend(abi_device *device, const char *params)
{
    kvp_gpu *gpu = kvp_gpu_of(device);
    kvp_gpu_backend *b = calloc(1, sizeof(*b));
    char err[768] = "";

    note_other_gpus(gpu);
    if (b == NULL || !kvp_settings_read_switch("KVANT_GRAPH", true, &b->graphs, err, sizeof(err)) ||
        !kvp_kv_new_context(err, sizeof(err))) {
        kvp_error("%s", err);
        free(b);
        return NULL;
    }
    /* an assumption: ggml does not ask a GPU about nodes in the computer's memory */
    kvp_kv_note_elsewhere();
    b->gpu = gpu;
    b->layers = kvp_kv_context();
    b->compute.n_threads = 1;
    b->backend = gpu->inner->iface.init_backend(gpu->inner, params);
    if (b->backend == NULL) {
        release(b);
        return NULL;
    }
    b->inner = b->backend->iface;
    if (!start(b)) {
        b->inner.free(b->backend);
        release(b);
        return NULL;
    }
    take_over(b, device);
    return b->backend;
}
