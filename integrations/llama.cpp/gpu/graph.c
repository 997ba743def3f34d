/* graph.c - finds out how a graph uses compressed caches, and prepares the caches before it is
 * computed.
 *
 * A graph that llama.cpp computes again is examined once: the caches that it writes to, the
 * addresses of its cell numbers and positions, and the masks of its attention. Before each
 * computation the caches learn which cells are written. backend.c computes the graph. */
#include "gpu.h"

#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

/* Whether a cache has to know the cells before a graph for another reason than their marks. */
static bool prepares(const kvp_gpu_cache *cache)
{
    return cache->keeps || cache->learns;
}

/* The input that holds the positions of a node's tokens, or NULL. RoPE takes it under any name;
 * other nodes are asked for the name that llama.cpp gives it. */
static const abi_tensor *positions_of(const abi_tensor *node)
{
    const abi_tensor *at = node->op == kvp_api.op.rope ? node->src[1] : NULL;

    if (at != NULL && at->op == kvp_api.op.none && kvp_cache_tensor_of(node) == NULL)
        return at;
    for (int i = 0; i < ABI_MAX_SRC; i++)
        if (node->src[i] != NULL && node->src[i]->type == ABI_TYPE_I32 &&
            strstr(node->src[i]->name, "inp_pos") != NULL)
            return node->src[i];
    return NULL;
}

/* With -sm tensor a step is several graphs. A graph without positions uses the positions of the
 * graph before. */
void kvp_gpu_find_positions(kvp_gpu_backend *b, const abi_graph *graph)
{
    for (int i = 0; i < graph->n_nodes; i++) {
        const abi_tensor *found = positions_of(graph->nodes[i]);
        if (found == NULL)
            continue;
        b->positions = found->data;
        return;
    }
}

/* Warns once per context. */
static void warn_of_positions(kvp_gpu_backend *b, const kvp_gpu_cache *cache)
{
    if (b->warned || (cache->exact.first == 0 && !cache->learns_key_transform))
        return;
    b->warned = true;
    kvp_error("warning: %s cannot find the positions of tokens in this model's graph: the first "
              "tokens are not kept in fp16, and keys have no centres by position",
              b->gpu->name);
}

static void find_last_attention(kvp_gpu_backend *b, const abi_graph *graph)
{
    for (int i = 0; i < graph->n_nodes; i++) {
        const abi_tensor *node = graph->nodes[i];
        if (node->op != kvp_api.op.flash_attn_ext || !kvp_gpu_is_ours(node) ||
            !kvp_is_kv(node->src[1]))
            continue;
        for (int w = 0; w < b->n_writes; w++)
            if (b->writes[w].cache == kvp_gpu_cells_of(node->src[1])->cache)
                b->writes[w].last = node;
    }
}

/* Finds the caches that the graph writes to. False when there are more than there is room for, or
 * when the keys have different cell numbers. */
static bool find_writes(kvp_gpu_backend *b, const abi_graph *graph)
{
    b->n_writes = 0;
    kvp_gpu_find_positions(b, graph);
    for (int i = 0; i < graph->n_nodes; i++) {
        const abi_tensor *node = graph->nodes[i];
        kvp_gpu_cache *cache = kvp_gpu_is_ours(node) ? kvp_gpu_prepared(node) : NULL;
        int at = 0;
        while (at < b->n_writes && b->writes[at].cache != cache)
            at++;
        if (cache == NULL || (at < b->n_writes && b->writes[at].cells->data == node->src[1]->data))
            continue;
        if (at < b->n_writes || at == (int)(sizeof(b->writes) / sizeof(b->writes[0]))) {
            if (!prepares(cache))
                continue;
            kvp_error("%s: the graph writes to the cache with more index tensors than the GPU "
                      "device supports; set KVANT_GPU=0, and report the model",
                      node->name);
            return false;
        }
        b->writes[b->n_writes++] = (struct kvp_gpu_writes){ .cache = cache, .cells = node->src[1] };
    }
    find_last_attention(b, graph);
    return true;
}

/* Finds the masks of the graph's attention. Also binds the caches to their head_dim, because with
 * -sm tensor no graph was seen before. */
static bool find_masks(kvp_gpu_backend *b, const abi_graph *graph)
{
    b->n_attended = 0;
    for (int i = 0; i < graph->n_nodes; i++) {
        const abi_tensor *node = graph->nodes[i];
        if (node->op != kvp_api.op.flash_attn_ext || !kvp_gpu_is_ours(node))
            continue;
        if (kvp_attention_supported(node) && kvp_kv_of(node->src[1]) != NULL)
            b->context = kvp_kv_of(node->src[1])->layers;
        if (!kvp_gpu_find_attended(b, node)) {
            kvp_error("%s: the graph has more masks or streams than the GPU device supports; set "
                      "KVANT_GPU=0, and report the model",
                      node->name);
            return false;
        }
    }
    return true;
}

bool kvp_gpu_look_at(kvp_gpu_backend *b, const abi_graph *graph)
{
    return find_masks(b, graph) && find_writes(b, graph);
}

/* Notes the rows of a cache that needs no preparation, for saved states, and so that it does not
 * count as empty. step: NULL when its cells are not known; then any cell may have a row. */
static void hold(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    if (step == NULL)
        memset(cache->written, 0xff, cache->n_blocks * sizeof(*cache->written));
    for (size_t i = 0; step != NULL && i < step->n; i++)
        kvp_gpu_cache_mark_written(cache, step->cells[i]);
}

bool kvp_gpu_prepare(kvp_gpu_backend *b, bool *waits)
{
    bool ok = true;

    *waits = true;
    kvp_gpu_follow(b);
    if (!kvp_gpu_prepare_attended(b))
        return false;
    for (int i = 0; i < b->n_writes && ok; i++) {
        const abi_tensor *cells = b->writes[i].cells;
        kvp_gpu_cache *cache = b->writes[i].cache;
        kvp_gpu_step step;
        const bool found =
            kvp_gpu_find_step(b->gpu, cells->data, b->positions, (size_t)cells->ne[0], &step);
        ok = kvp_gpu_marks_prepare(cache, cells, found ? &step : NULL, b->gpu->stream);
        if (!prepares(cache)) {
            hold(cache, found ? &step : NULL);
            continue;
        }
        if (!found && b->gpu->lost_input)
            kvp_error("%s: out of memory for the ids of the cells, so the tokens are refused; free "
                      "memory and try again",
                      cells->name);
        else if (!found)
            kvp_error("%s: llama.cpp did not copy the ids of the cells through the GPU device; "
                      "set KVANT_GPU=0, and report the model",
                      cells->name);
        else if (step.positions == NULL)
            warn_of_positions(b, cache);
        ok = ok && found &&
             kvp_gpu_cache_prepare(cache, &step, kvp_gpu_mask_of(b->gpu, b->writes[i].last, step.n),
                                   b->gpu->stream);
        *waits = *waits && (!cache->keeps || cache->all_pending);
    }
    b->gpu->lost_input = false;
    kvp_gpu_forget_masks(b);
    return ok;
}
