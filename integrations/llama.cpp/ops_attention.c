/* ops_attention.c - FLASH_ATTN_EXT with keys and values in a compressed cache, or in ggml's own
 * formats in host memory.
 *
 * Shapes as ggml has them (first index fastest; s = streams taking part):
 *   q     [head_dim of k, tokens, heads, s]        f32
 *   k, v  [head_dim, cells, kv heads, s]           in a compressed cache: permuted views of a cache
 *                                                  tensor, over whole streams from the first; else
 *                                                  any strided view whose rows (the channels of one
 *                                                  token and head) are contiguous
 *   mask  [cells, tokens or more, 1, 1 or s]       f16
 *   sinks [heads]                                  f32
 *   out   [head_dim of v, heads, tokens, s]        f32
 *
 * Declined nodes go to the CPU back end. These are nodes with a mask per head, with keys outside a
 * cache, with other types, or with a head_dim that is no multiple of the format's block. If their
 * keys are in a compressed cache, the scheduler copies decoded rows, which is correct but slow.
 */
#include <kvant/attention.h>
#include <kvant/block_attention.h>
#include <kvant/tensor_hooks.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "ggml_api.h"
#include "kv_store.h"
#include "log.h"
#include "ops.h"
#include "trace.h"

/* Finds the view's first stream. False when the view is not cells 0 .. ne[1] - 1 of neighbouring
 * streams. */
static bool cells_view(const abi_tensor *view, uint32_t *first_stream)
{
    const abi_tensor *root = kvp_root(view);
    size_t head_bytes = (size_t)view->ne[0] * sizeof(uint16_t);

    if (!kvp_is_kv(view) || view->nb[0] != sizeof(uint16_t) || view->nb[1] != root->nb[1] ||
        (view->ne[2] > 1 && view->nb[2] != head_bytes) ||
        view->ne[0] * view->ne[2] != root->ne[0] || view->ne[1] > root->ne[1] ||
        view->view_offs % root->nb[2] != 0 || (view->ne[3] > 1 && view->nb[3] != root->nb[2]))
        return false;
    *first_stream = (uint32_t)(view->view_offs / root->nb[2]);
    return *first_stream + view->ne[3] <= root->ne[2];
}

/* Whether the values are a view of the keys' latents: the same cells and streams, without RoPE's
 * channels. */
static bool latents_view(const abi_tensor *k, const abi_tensor *v)
{
    uint32_t first_stream;

    return cells_view(k, &first_stream) && kvp_root(k) == kvp_root(v) && k->ne[2] == 1 &&
           v->ne[0] + (int64_t)KVP_MLA_PART == k->ne[0] && v->view_offs == k->view_offs &&
           v->nb[0] == k->nb[0] && v->nb[1] == k->nb[1] && v->ne[3] == k->ne[3] &&
           (v->ne[3] == 1 || v->nb[3] == k->nb[3]);
}

static bool is_latents(const abi_tensor *k)
{
    return kvp_kv_of(k) != NULL && kvp_kv_of(k)->shape.latents;
}

/* Whether the mask is one that kvant reads: one mask for all heads, with one stream or with q's
 * streams. No mask is fine, too. */
static bool mask_fits(const abi_tensor *mask, const abi_tensor *q, const abi_tensor *k)
{
    return mask == NULL || (mask->type == ABI_TYPE_F16 && mask->nb[0] == sizeof(uint16_t) &&
                            mask->ne[0] >= k->ne[1] && mask->ne[1] >= q->ne[1] &&
                            mask->ne[2] == 1 && (mask->ne[3] == 1 || mask->ne[3] == q->ne[3]));
}

/* The conditions on a node's shapes that both devices have. */
static bool shapes_fit(const abi_tensor *node)
{
    const abi_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *sinks = node->src[4];

    return q->type == ABI_TYPE_F32 && q->nb[0] == sizeof(float) && node->type == ABI_TYPE_F32 &&
           node->nb[0] == sizeof(float) && q->ne[0] == k->ne[0] && k->ne[1] == v->ne[1] &&
           k->ne[2] == v->ne[2] && k->ne[2] > 0 && q->ne[2] % k->ne[2] == 0 &&
           q->ne[3] == k->ne[3] && q->ne[3] == v->ne[3] && mask_fits(node->src[3], q, k) &&
           (sinks == NULL || sinks->type == ABI_TYPE_F32);
}

/* Binds the cache to the node's head_dim. While llama.cpp only estimates memory there are no cells
 * to bind. */
static bool bind(const abi_tensor *view)
{
    kvp_kv *kv = kvp_kv_of(view);

    return kv == NULL || kvp_kv_bind(kv, (uint32_t)view->ne[0]);
}

bool kvp_attention_supported(const abi_tensor *node)
{
    const abi_tensor *k = node->src[1], *v = node->src[2];
    uint32_t k_stream, v_stream;

    if (kvp_plans_keys_only(node))
        return true;
    if (!kvp_is_kv(k) || !kvp_is_kv(v))
        return false;
    /* accepted all the same: the memory of its result is refused, which says why */
    if (!bind(k) || !bind(v))
        return kvp_kv_refused();
    if (is_latents(k) && latents_view(k, v) && shapes_fit(node))
        return true;
    if (!is_latents(k) && !is_latents(v) && cells_view(k, &k_stream) && cells_view(v, &v_stream) &&
        k_stream == v_stream && shapes_fit(node))
        return true;
    kvp_note("%s: the CPU back end computes this attention node on decoded copies",
             kvp_root(k)->name);
    return false;
}

/* The attention problem of one stream, without keys and values. */
static kvant_attention_problem problem_of(const kvp_compute *compute, const abi_tensor *node,
                                          size_t stream)
{
    const abi_tensor *q = node->src[0], *k = node->src[1], *mask = node->src[3],
                     *sinks = node->src[4];
    const size_t mask_offset = mask != NULL && mask->ne[3] > 1 ? stream * mask->nb[3] : 0;
    float parameters[3]; /* scale, max_bias, logit_softcap */

    memcpy(parameters, node->op_params, sizeof(parameters));
    return (kvant_attention_problem){
        .size = sizeof(kvant_attention_problem),
        .exact = compute->fp32,
        .n_tokens = (uint32_t)k->ne[1],
        .n_queries = (uint32_t)q->ne[1],
        .n_heads = (uint32_t)q->ne[2],
        .q = (const float *)(const void *)((const char *)q->data + stream * q->nb[3]),
        .q_token_stride = q->nb[1] / sizeof(float),
        .q_head_stride = q->nb[2] / sizeof(float),
        .mask = mask != NULL
                    ? (const uint16_t *)(const void *)((const char *)mask->data + mask_offset)
                    : NULL,
        .mask_token_stride = mask != NULL ? mask->nb[1] / sizeof(uint16_t) : 0,
        .sinks = sinks != NULL ? sinks->data : NULL,
        .scale = parameters[0],
        .max_bias = mask != NULL ? parameters[1] : 0,
        .logit_softcap = parameters[2],
        .out = (float *)(void *)((char *)node->data + stream * node->nb[3]),
        .out_token_stride = node->nb[2] / sizeof(float),
        .out_head_stride = node->nb[1] / sizeof(float),
        .n_threads = compute->n_threads,
    };
}

static void *workspace_of(void *compute, size_t bytes)
{
    return kvp_compute_workspace(compute, bytes);
}

/* Attends, and stores a held row in the same call. If the row is refused, a separate write comes
 * first, which makes its cell invalid. */
static kvant_status run(kvp_compute *compute, kvp_kv *k, const kvp_kv *v,
                        const kvant_attention_problem *problem)
{
    kvant_attention_step step = { .workspace = workspace_of, .user = compute };
    kvp_held_row *held = &compute->held;
    kvant_status status;

    if (held->is_held && kvp_kv_begin_step(held, &step) == KVANT_OK) {
        step.position = k->single_position >= 0 ? &k->single_position : NULL;
        status = kvant_attention_step_run(k->tensor, v->tensor, problem, &step);
        if (step.position == NULL)
            k->single_position = -1;
        if (step.stored) {
            kvp_kv_end_step(held);
            return status;
        }
    }
    if (held->is_held) {
        status = kvp_kv_store_held(held, compute->n_threads);
        if (status != KVANT_OK)
            return status;
    }
    step.k_row = step.v_row = NULL;
    step.position = NULL;
    return kvant_attention_step_run(k->tensor, v->tensor, problem, &step);
}

static bool reserve(void **memory, size_t *have, size_t need, size_t size)
{
    void *larger = need > *have ? realloc(*memory, need * size) : *memory;

    if (larger == NULL)
        return false;
    *memory = larger;
    *have = need > *have ? need : *have;
    return true;
}

/* Attends the tokens first .. first + n - 1 of the batch, which belong to one sequence, to the
 * blocks of this sequence. So results do not depend on other sequences, and no time is spent on
 * them. */
static kvant_status attend_sequence(kvp_compute *compute, kvp_kv *k, const kvp_kv *v,
                                    const kvp_mask *mask, kvant_attention_problem problem,
                                    uint32_t first, uint32_t n)
{
    const kvp_placement *placement = k->placement;
    uint32_t n_blocks = kvp_placement_blocks(k->shape.n_cells), width;

    if (!reserve((void **)&compute->table, &compute->n_table, n_blocks, sizeof(*compute->table)))
        return KVANT_ERR_MEMORY;
    n_blocks = kvp_placement_table(placement, mask, first, n, compute->table);
    width = n_blocks * KVP_BLOCK;
    problem.block_table = compute->table;
    problem.n_queries = n;
    problem.q += first * problem.q_token_stride;
    problem.out += first * problem.out_token_stride;
    if (mask->rows != NULL && width <= mask->n_cells &&
        kvp_placement_in_order(placement, compute->table, n_blocks)) {
        problem.mask += first * problem.mask_token_stride;
    } else {
        if (!reserve((void **)&compute->masks, &compute->n_masks, (size_t)n * width + 1,
                     sizeof(*compute->masks)))
            return KVANT_ERR_MEMORY;
        for (uint32_t i = 0; i < n; i++)
            kvp_placement_gather(placement, mask, first + i, compute->table, n_blocks,
                                 compute->masks + (size_t)i * width);
        problem.mask = compute->masks;
        problem.mask_token_stride = width;
    }
    problem.n_tokens = width;
    return run(compute, k, v, &problem);
}

static kvant_status attend_placed(kvp_compute *compute, const abi_tensor *node, kvp_kv *k,
                                  kvp_kv *v)
{
    kvant_attention_problem problem = problem_of(compute, node, 0);
    kvp_mask mask = { problem.mask, problem.mask_token_stride, problem.n_tokens,
                      problem.n_queries };
    kvant_status status = kvp_kv_flush(k, &mask, compute->n_threads);

    if (status == KVANT_OK)
        status = kvp_kv_flush(v, &mask, compute->n_threads);
    for (uint32_t first = 0, n; first < problem.n_queries && status == KVANT_OK; first += n) {
        n = (uint32_t)kvp_placement_run(k->placement, problem.n_queries, first);
        status = attend_sequence(compute, k, v, &mask, problem, first, n);
    }
    return status;
}

kvant_status kvp_attention_note_queries(const kvp_compute *compute, const abi_tensor *node,
                                        kvp_kv *k, const int32_t *positions)
{
    kvant_status status = KVANT_OK;

    for (size_t s = 0; s < (size_t)node->src[0]->ne[3] && status == KVANT_OK; s++) {
        const kvant_attention_problem problem = problem_of(compute, node, s);
        const kvant_queries queries = { .size = sizeof(queries),
                                        .q = problem.q,
                                        .token_stride = problem.q_token_stride,
                                        .head_stride = problem.q_head_stride,
                                        .n_tokens = problem.n_queries,
                                        .n_heads = problem.n_heads,
                                        .positions = positions != NULL
                                                         ? positions + s * problem.n_queries
                                                         : NULL };
        status = kvant_tensor_note_queries(k->tensor, &queries, compute->n_threads);
    }
    return status;
}

/* Whether the node's only token has entered the cache with its position. */
static bool is_single(const abi_tensor *node, const kvp_kv *k)
{
    return k->single_position >= 0 && node->src[0]->ne[1] * node->src[0]->ne[3] == 1;
}

/* Lets pending keys learn from the queries of the same batch before they are stored. */
static kvant_status learn_queries(kvp_compute *compute, const abi_tensor *node, kvp_kv *k)
{
    const abi_tensor *q = node->src[0];
    const size_t n = (size_t)(q->ne[1] * q->ne[3]);
    const int32_t *positions = is_single(node, k)  ? &k->single_position
                               : k->pending.n == n ? k->pending.positions
                                                   : NULL;
    kvant_status status = KVANT_OK;

    if (positions != NULL || k->pending.n != 0)
        status = kvp_attention_note_queries(compute, node, k, positions);
    k->single_position = -1;
    return status == KVANT_OK && k->placement == NULL ? kvp_kv_flush(k, NULL, compute->n_threads)
                                                      : status;
}

/* Writes NaN for all heads of the tokens that see a cell. */
static void spoil_tokens(const kvant_attention_problem *p, uint32_t cell, size_t head_dim)
{
    for (uint32_t token = 0; token < p->n_queries; token++) {
        if (p->mask != NULL && p->mask[token * p->mask_token_stride + cell] == KVP_HIDDEN)
            continue;
        for (uint32_t head = 0; head < p->n_heads; head++)
            for (size_t i = 0; i < head_dim; i++)
                p->out[token * p->out_token_stride + head * p->out_head_stride + i] = NAN;
    }
}

/* Writes NaN for tokens that see the cell of a refused row. In llama.cpp's f16 cache such tokens
 * get NaN as well, because the cell holds a NaN. stream: the stream of the tensors. */
static void spoil_outputs(const kvp_kv *k, const kvp_kv *v, size_t stream,
                          const kvant_attention_problem *problem, size_t value_dim)
{
    const size_t first = stream * k->shape.n_cells;

    for (uint32_t cell = 0; k->invalid.n + v->invalid.n > 0 && cell < problem->n_tokens; cell++)
        if (kvp_invalid_has(&k->invalid, first + cell) ||
            kvp_invalid_has(&v->invalid, first + cell))
            spoil_tokens(problem, cell, value_dim);
}

static uint32_t first_block(const kvp_kv *kv, size_t stream)
{
    return (uint32_t)(kvp_kv_slot(kv, (int64_t)(kv->shape.n_cells * stream)) / KVANT_PAGE_TOKENS);
}

static kvant_status attend_cells(kvp_compute *compute, const abi_tensor *node, size_t stream)
{
    kvp_kv *k = kvp_kv_of(node->src[1]), *v = kvp_kv_of(node->src[2]);
    kvant_attention_problem problem = problem_of(compute, node, stream);
    const bool single = is_single(node, k);
    uint32_t first_stream = 0;
    kvant_status status = KVANT_OK;

    if (k->placement != v->placement) /* keys and values of one layer lie in one buffer */
        return KVANT_ERR_UNSUPPORTED;
    if (!single)
        status = learn_queries(compute, node, k);
    if (status != KVANT_OK)
        return status;
    cells_view(node->src[1], &first_stream);
    if (kvp_trace_is_on)
        kvp_trace_attention(k, first_stream + stream, &problem);
    problem.first_block = first_block(k, first_stream + stream);
    status =
        k->placement != NULL ? attend_placed(compute, node, k, v) : run(compute, k, v, &problem);
    spoil_outputs(k, v, first_stream + stream, &problem, v->head_dim);
    if (k->single_position >= 0 && single && status == KVANT_OK) /* no step has noted them */
        status = learn_queries(compute, node, k);
    return status;
}

static bool sees(const kvant_attention_problem *p, uint32_t query, uint32_t cell)
{
    return p->mask == NULL || p->mask[query * p->mask_token_stride + cell] != KVP_HIDDEN;
}

/* Counts tokens, from the first on, each of which sees the last cell that the token before it sees.
 * These tokens belong to one sequence, or to sequences that share cells. Attention multiplies a
 * page with the queries of all tokens of a call, so one call should not have several sequences. */
static uint32_t latents_run(const kvant_attention_problem *p, uint32_t first)
{
    uint32_t n = 1;

    for (; first + n < p->n_queries; n++) {
        uint32_t cell = p->n_tokens;
        while (cell > 0 && !sees(p, first + n - 1, cell - 1))
            cell--;
        if (cell > 0 && !sees(p, first + n, cell - 1))
            break;
    }
    return n;
}

static kvant_status run_latents(kvp_compute *compute, const kvp_kv *kv, uint32_t value_dim,
                                const kvant_attention_problem *problem)
{
    size_t bytes;
    kvant_status status = kvant_latent_attention_workspace(kv->tensor, value_dim, problem, &bytes);

    if (status != KVANT_OK)
        return status;
    if (kvp_compute_workspace(compute, bytes) == NULL)
        return KVANT_ERR_MEMORY;
    return kvant_latent_attention(kv->tensor, value_dim, problem, compute->workspace,
                                  compute->workspace_bytes);
}

/* Attention when keys and values are one row. Cells are slots, so there is no placement and no row
 * is pending. */
static kvant_status attend_latents(kvp_compute *compute, const abi_tensor *node, size_t stream)
{
    const kvp_kv *kv = kvp_kv_of(node->src[1]);
    const uint32_t value_dim = (uint32_t)node->src[2]->ne[0];
    kvant_attention_problem problem = problem_of(compute, node, stream);
    uint32_t first_stream = 0;
    kvant_status status = KVANT_OK;

    cells_view(node->src[1], &first_stream);
    if (kvp_trace_is_on)
        kvp_trace_attention(kv, first_stream + stream, &problem);
    problem.first_block = first_block(kv, first_stream + stream);
    for (uint32_t first = 0, n; first < problem.n_queries && status == KVANT_OK; first += n) {
        kvant_attention_problem part = problem;
        part.n_queries = n = latents_run(&problem, first);
        part.q += first * part.q_token_stride;
        part.out += first * part.out_token_stride;
        part.mask += part.mask != NULL ? first * part.mask_token_stride : 0;
        status = run_latents(compute, kv, value_dim, &part);
    }
    spoil_outputs(kv, kv, first_stream + stream, &problem, value_dim);
    return status;
}

/* Attends all streams of the node. */
static int32_t attend_all(kvp_compute *compute, const abi_tensor *node, const char *name,
                          kvant_status (*attend)(kvp_compute *compute, const abi_tensor *node,
                                                 size_t stream))
{
    for (int64_t s = 0; s < node->src[0]->ne[3]; s++) {
        kvant_status status = attend(compute, node, (size_t)s);
        if (status != KVANT_OK) {
            kvp_error("%s: attention could not be computed: %s", name,
                      status == KVANT_ERR_MEMORY ? kvant_strerror(status) : kvant_error_message());
            return status == KVANT_ERR_MEMORY ? ABI_STATUS_ALLOC_FAILED : ABI_STATUS_FAILED;
        }
    }
    return ABI_STATUS_SUCCESS;
}

int32_t kvp_attention(kvp_compute *compute, abi_tensor *node)
{
    if (kvp_kv_refused() || !kvp_attention_supported(node) || kvp_kv_of(node->src[1]) == NULL ||
        kvp_kv_of(node->src[2]) == NULL)
        return ABI_STATUS_FAILED;
    return attend_all(compute, node, kvp_root(node->src[1])->name,
                      is_latents(node->src[1]) ? attend_latents : attend_cells);
}

/* ggml's own formats */

/* Whether the view has a format that the library can read. The library's numbers of formats are
 * ggml's numbers, which this function relies on. */
static bool rows_supported(const abi_tensor *view)
{
    return view->ne[0] > 0 && view->ne[0] <= KVANT_BLOCK_MAX_HEAD_DIM &&
           kvant_block_row_bytes((kvant_block_type)view->type, (uint32_t)view->ne[0]) != 0 &&
           view->ne[1] <= UINT32_MAX;
}

static bool in_whole_floats(const abi_tensor *tensor)
{
    return tensor->nb[1] % sizeof(float) == 0 && tensor->nb[2] % sizeof(float) == 0 &&
           tensor->ne[1] <= UINT32_MAX && tensor->ne[2] <= UINT32_MAX;
}

bool kvp_block_attention_supported(const abi_tensor *node)
{
    const abi_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];

    return q != NULL && k != NULL && v != NULL && shapes_fit(node) && in_whole_floats(q) &&
           in_whole_floats(node) && rows_supported(k) && rows_supported(v);
}

/* The rows of stream s of a view. */
static kvant_block_rows rows_of(const abi_tensor *view, size_t s)
{
    size_t offset = s * view->nb[3];

    return (kvant_block_rows){ .size = sizeof(kvant_block_rows),
                               .type = (kvant_block_type)view->type,
                               .head_dim = (uint32_t)view->ne[0],
                               .n_kv_heads = (uint32_t)view->ne[2],
                               .data = (const char *)view->data + offset,
                               .bytes = kvp_api.nbytes(view) - offset,
                               .token_stride = view->nb[1],
                               .head_stride = view->nb[2] };
}

static kvant_status attend_rows(kvp_compute *compute, const abi_tensor *node, size_t stream)
{
    kvant_block_rows k = rows_of(node->src[1], stream), v = rows_of(node->src[2], stream);
    kvant_attention_problem problem = problem_of(compute, node, stream);
    size_t bytes;
    kvant_status status = kvant_block_attention_workspace(&k, &v, &problem, &bytes);

    if (status != KVANT_OK)
        return status;
    if (kvp_compute_workspace(compute, bytes) == NULL)
        return KVANT_ERR_MEMORY;
    return kvant_block_attention(&k, &v, &problem, compute->workspace, compute->workspace_bytes);
}

int32_t kvp_block_attention(kvp_compute *compute, abi_tensor *node)
{
    if (!kvp_block_attention_supported(node))
        return ABI_STATUS_FAILED;
    return attend_all(compute, node, node->name, attend_rows);
}
