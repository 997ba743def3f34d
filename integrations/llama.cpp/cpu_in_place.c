/* cpu_in_place.c - see cpu_in_place.h. */
#include "cpu_in_place.h"

#include <stdlib.h>
#include <string.h>

#include "../../src/store/plan.h"
#include "buffer.h"
#include "ggml_api.h"
#include "log.h"
#include "rope.h"

/* In a step of one token, queries are noted if its cell is a multiple of this. Each attention node
 * of such a step is followed by a node of ours, at which llama.cpp's threads meet. */
#define ASK_EVERY 8
/* Caches of a graph: the cache of all tokens, and the cache of a sliding window. More are never in
 * place. */
#define MOST_CACHES 4
/* A step of more tokens is a prompt's. It finds all layers in one form. */
#define SHORT_STEP 16u

/* A cache in a graph. */
struct use {
    kvp_region *region;
    const abi_tensor *attention, *write; /* nodes; `write` stores keys or values */
    bool shifts, other;                  /* other: something that ggml cannot do in place */
};

/* Moves rows on llama.cpp's threads, between graphs. */
struct job {
    kvp_region *region;
    size_t n, first, end;
    uint32_t n_threads;
    kvant_status status;
    bool done;
};

static void run_job(void *user)
{
    struct job *job = user;

    job->status = kvp_cpu_rows_store(job->region, job->n, job->n_threads);
}

static kvant_status let_go(kvp_compute *compute, kvp_region *region, size_t n)
{
    struct job job = { .region = region, .n = n, .n_threads = compute->n_threads };

    if (n > 0)
        kvp_host_threads_compute(&compute->host_threads, run_job, &job);
    return job.status;
}

/* Graphs */

static const int64_t *cells_of(const struct use *use)
{
    return use->write->src[1]->data;
}

static size_t n_tokens_of(const struct use *use)
{
    return (size_t)use->write->src[0]->ne[1];
}

/* Whether two nodes write rows of the same cells. */
static bool write_alike(const abi_tensor *a, const abi_tensor *b)
{
    const abi_tensor *x = a->src[1], *y = b->src[1];

    return a->src[0]->ne[1] == b->src[0]->ne[1] && x->type == ABI_TYPE_I64 &&
           y->type == ABI_TYPE_I64 && x->nb[0] == sizeof(int64_t) && y->nb[0] == sizeof(int64_t) &&
           a->view_offs == 0 && b->view_offs == 0 &&
           (x->data == y->data ||
            memcmp(x->data, y->data, (size_t)a->src[0]->ne[1] * sizeof(int64_t)) == 0);
}

static bool is_shift(const abi_tensor *node)
{
    return node->op == kvp_api.op.rope && node->view_src != NULL && node->ne[3] == 1;
}

static void note_node(struct use *use, const abi_tensor *node)
{
    if (node->op == kvp_api.op.set_rows) {
        use->write = use->write != NULL ? use->write : node;
        use->other = use->other || !write_alike(use->write, node);
    } else if (node->op == kvp_api.op.flash_attn_ext) {
        if (use->attention == NULL || node->src[1]->ne[1] > use->attention->src[1]->ne[1])
            use->attention = node;
    } else {
        use->shifts = use->shifts || is_shift(node);
        use->other = use->other || !is_shift(node);
    }
}

/* Finds how the graph uses caches, and returns their number. */
static size_t find_uses(struct use *uses, const kvp_cache_node *nodes, size_t n)
{
    size_t n_uses = 0;

    for (size_t i = 0; i < n; i++) {
        kvp_region *region = kvp_cpu_rows_region(nodes[i].kv);
        size_t at = 0;
        while (at < n_uses && uses[at].region != region)
            at++;
        if (at == MOST_CACHES)
            continue;
        if (at == n_uses)
            uses[n_uses++] = (struct use){ .region = region };
        note_node(&uses[at], nodes[i].node);
    }
    return n_uses;
}

static int64_t last_cell(const struct use *use)
{
    const int64_t *cells = cells_of(use);
    int64_t last = 0;

    for (size_t i = 0; i < n_tokens_of(use); i++) {
        if (cells[i] < 0)
            return INT64_MAX;
        last = cells[i] > last ? cells[i] : last;
    }
    return last;
}

/* The number of layers in place that go to pages before the graph's rows are stored. A prompt finds
 * all layers in one form. It takes all of them if it leaves fewer cells than single tokens after it
 * need, because rows that go to pages at once cost less than rows that go there later. */
static size_t n_to_go(const struct use *use, size_t n_layers)
{
    const struct kvp_cpu_rows *rows = use->region->rows;
    const size_t n = n_tokens_of(use), left = rows->room - 1 - (size_t)last_cell(use);

    if (rows->whole)
        return 0;
    if (n <= SHORT_STEP)
        return kvant_plan_layers_to_go(n_layers, left, n);
    return n_layers < rows->n_all || left < rows->n_all ? rows->n_all : 0;
}

/* Whether the graph's rows, and all rows that its attention reads, fit in place. The graph may be a
 * part of a step, with attention or with rows alone (cb_eval). */
static bool fits(const struct use *use)
{
    const size_t room = use->region->rows->room;

    if (use->other || (use->attention != NULL && (size_t)use->attention->src[1]->ne[1] > room))
        return false;
    return use->write == NULL ||
           (n_tokens_of(use) <= room && last_cell(use) < (int64_t)room &&
            (use->attention == NULL || use->attention->src[0]->ne[1] == use->write->src[0]->ne[1]));
}

/* A mask that ggml did not compute yet is an input of fp16, or the copy of an input of fp32. */
static const abi_tensor *input_of(const abi_tensor *mask)
{
    const abi_tensor *input = mask;

    if (mask->op != kvp_api.op.none && mask->src[0] != NULL &&
        (mask->src[1] == NULL || mask->src[1] == mask) && mask->src[2] == NULL &&
        mask->src[0]->type == ABI_TYPE_F32 &&
        memcmp(mask->ne, mask->src[0]->ne, sizeof(mask->ne)) == 0)
        input = mask->src[0];
    return input->op == kvp_api.op.none && kvp_root(input)->buffer != NULL &&
                   kvp_api.buft_is_host(kvp_root(input)->buffer->buft)
               ? input
               : NULL;
}

/* Reads the cells that the graph's tokens see. *halves is freed by the caller. */
static kvant_status read_mask(const struct use *use, kvp_mask *mask, uint16_t **halves)
{
    const abi_tensor *of = use->attention->src[3], *input = of != NULL ? input_of(of) : NULL;
    const size_t n = (size_t)use->attention->src[0]->ne[1];

    *mask = (kvp_mask){ .n_cells = (uint32_t)use->attention->src[1]->ne[1], .n_tokens = n };
    *halves = NULL;
    if (of == NULL)
        return KVANT_OK;
    if (input == NULL || (size_t)input->ne[1] < n || input->ne[0] < mask->n_cells)
        return KVANT_ERR_UNSUPPORTED;
    mask->stride = input->nb[1] / (input->type == ABI_TYPE_F16 ? sizeof(uint16_t) : sizeof(float));
    mask->rows = input->data;
    if (input->type == ABI_TYPE_F16)
        return KVANT_OK;
    *halves = malloc(n * mask->stride * sizeof(uint16_t));
    if (*halves == NULL)
        return KVANT_ERR_MEMORY;
    kvp_api.fp32_to_fp16_row(input->data, *halves, (int64_t)(n * mask->stride));
    mask->rows = *halves;
    return KVANT_OK;
}

/* Whether the step's rows belong to the sequence in place, or begin another one at cell 0, which
 * llama.cpp does when it has removed the former. */
static bool is_single(const kvp_region *region)
{
    struct kvp_cpu_rows *rows = region->rows;
    bool single = true;

    for (size_t i = 0; i < rows->n_batch && single; i++) {
        const int64_t slot = kvp_placement_slot(region->placement, (uint32_t)rows->cells[i]);
        const uint32_t sequence =
            kvp_placement_block(region->placement, (uint32_t)(slot / KVP_BLOCK)).sequence;
        if (i == 0 && rows->cells[0] == 0)
            rows->sequence = sequence;
        single = sequence == rows->sequence;
    }
    return single;
}

/* Places the step's rows, for the time when they leave. KVANT_ERR_UNSUPPORTED: they cannot stay in
 * place. */
static kvant_status place(const struct use *use)
{
    uint16_t *halves = NULL;
    kvp_mask mask;
    kvant_status status = read_mask(use, &mask, &halves);

    if (status == KVANT_OK && !kvp_cpu_rows_place(use->region, &mask))
        status = KVANT_ERR_MEMORY;
    free(halves);
    return status == KVANT_OK && !is_single(use->region) ? KVANT_ERR_UNSUPPORTED : status;
}

static void note_cells(const struct use *use)
{
    struct kvp_cpu_rows *rows = use->region->rows;

    rows->n_batch = n_tokens_of(use);
    memcpy(rows->cells, cells_of(use), rows->n_batch * sizeof(*rows->cells));
    rows->unplaced = true;
}

/* Notes the positions of the graph's rows, and how RoPE rotates the keys of each layer. */
static void read_positions(const kvp_compute *compute, const struct use *use,
                           const kvp_cache_node *nodes, size_t n_nodes)
{
    struct kvp_cpu_rows *rows = use->region->rows;
    const int32_t *positions = NULL;

    for (size_t i = 0; i < n_nodes; i++) {
        kvp_kv *kv = nodes[i].kv;
        if (nodes[i].node->op == kvp_api.op.set_rows && kv->in_place &&
            kv->shape.role == KVANT_ROLE_K && kvp_cpu_rows_region(kv) == use->region &&
            (positions == NULL || !kv->roped))
            positions = kvp_rope_positions(compute, kv, nodes[i].node->src[0]);
    }
    rows->knows_batch = positions != NULL;
    for (size_t i = 0; i < rows->n_batch; i++) {
        rows->batch[i] = positions != NULL ? positions[i] : KVP_CPU_SOMEWHERE;
        rows->positions[rows->cells[i]] = rows->batch[i];
    }
    rows->asks = rows->n_batch > 1 || rows->cells[0] % ASK_EVERY == 0;
}

/* Coming back. llama.cpp does not say that it removed a sequence. It has, if the cache held one
 * sequence, and a batch takes the first cells and sees no others. Then n_kv shows that no cell from
 * there on is used. Cells between the batch and n_kv, which is padded, keep their rows all the
 * same. */

static bool sees_beyond(const kvp_mask *mask, size_t n)
{
    bool sees = mask->rows == NULL && mask->n_cells > n;

    for (size_t token = 0; mask->rows != NULL && token < n && !sees; token++)
        for (size_t cell = n; cell < mask->n_cells && !sees; cell++)
            sees = mask->rows[token * mask->stride + cell] != KVP_HIDDEN;
    return sees;
}

static bool is_alone(const struct use *use)
{
    const size_t n = n_tokens_of(use), n_kv = (size_t)use->attention->src[1]->ne[1];
    uint16_t *halves = NULL;
    kvp_mask mask;
    bool alone = n_kv - n < KVP_CELLS_PADDING && read_mask(use, &mask, &halves) == KVANT_OK &&
                 !sees_beyond(&mask, n);

    for (size_t i = 0; i < n && alone; i++)
        alone = cells_of(use)[i] == (int64_t)i;
    free(halves);
    return alone;
}

static void run_back(void *user)
{
    struct job *job = user;

    job->done = kvp_cpu_rows_come_back(job->region, job->first, job->end);
}

static bool come_back(kvp_compute *compute, const struct use *use)
{
    struct job job = { .region = use->region, .first = n_tokens_of(use) };

    if (use->attention == NULL || kvp_placement_sequences(use->region->placement) != 1 ||
        kvp_cpu_rows_pending(use->region) || !is_alone(use))
        return false;
    job.end = (size_t)use->attention->src[1]->ne[1];
    kvp_host_threads_compute(&compute->host_threads, run_back, &job);
    return job.done;
}

/* Puts a cache in place for a graph that writes rows, if it has no rows but the graph's. */
static bool begin(kvp_compute *compute, const struct use *use)
{
    kvp_region *region = use->region;
    const bool empty = use->write != NULL && kvp_cpu_rows_empty(region);

    if (use->write == NULL || (region->rows == NULL && (!empty || !kvp_cpu_rows_create(region))) ||
        !fits(use) || n_to_go(use, region->rows->n_all) > 0)
        return false;
    if (!empty)
        return come_back(compute, use);
    kvp_cpu_rows_begin(region);
    return true;
}

/* Lets ggml shift the keys in place. A shift covers all cells of the cache, but there is only
 * memory for the cells in place. The rows' positions after it are not known. */
static void clip_shifts(const struct use *use, const kvp_cache_node *nodes, size_t n_nodes)
{
    const struct kvp_cpu_rows *rows = use->region->rows;

    for (size_t i = 0; i < n_nodes; i++)
        if (is_shift(nodes[i].node) && kvp_cpu_rows_region(nodes[i].kv) == use->region)
            kvp_clip_shift(nodes[i].node, (int64_t)rows->room);
    for (size_t i = 0; i < rows->room; i++)
        rows->positions[i] =
            rows->positions[i] == KVP_CPU_NO_ROW ? KVP_CPU_NO_ROW : KVP_CPU_SOMEWHERE;
}

/* Decides for one cache. */
static kvant_status prepare(kvp_compute *compute, const struct use *use,
                            const kvp_cache_node *nodes, size_t n_nodes)
{
    kvp_region *region = use->region;
    kvant_status status = KVANT_OK;

    if (region->placement == NULL)
        return KVANT_OK;
    if (!kvp_cpu_rows_all(region) && !begin(compute, use) && !kvp_cpu_rows_some(region))
        return KVANT_OK;
    if (!fits(use) || (use->shifts && (use->write != NULL || !kvp_cpu_rows_all(region))))
        return let_go(compute, region, SIZE_MAX);
    if (use->shifts)
        clip_shifts(use, nodes, n_nodes);
    if (use->write != NULL)
        note_cells(use);
    if (use->attention != NULL && region->rows->unplaced)
        status = place(use);
    if (status == KVANT_ERR_UNSUPPORTED)
        return let_go(compute, region, SIZE_MAX);
    if (status == KVANT_OK && use->write != NULL)
        status = let_go(compute, region, n_to_go(use, region->rows->n_layers));
    if (status == KVANT_OK && use->write != NULL && kvp_cpu_rows_some(region))
        read_positions(compute, use, nodes, n_nodes);
    return status;
}

int32_t kvp_cpu_in_place_prepare(kvp_compute *compute, const kvp_cache_node *nodes, size_t n)
{
    struct use uses[MOST_CACHES];
    const size_t n_uses = find_uses(uses, nodes, n);

    for (size_t i = 0; i < n_uses; i++)
        if (prepare(compute, &uses[i], nodes, n) != KVANT_OK) {
            kvp_error(
                "%s: out of memory for compressing the cache: the new tokens are refused, and "
                "earlier tokens are unchanged; free memory and try again",
                uses[i].region->tensors[0]->name);
            return ABI_STATUS_ALLOC_FAILED;
        }
    return ABI_STATUS_SUCCESS;
}

/* Queries */

bool kvp_cpu_in_place_asks(const kvp_kv *kv)
{
    const struct kvp_cpu_rows *rows = kvp_cpu_rows_region(kv)->rows;

    return kv->in_place && rows->asks && kvant_tensor_wants_queries(kv->tensor, rows->n_batch);
}

void kvp_cpu_in_place_note(kvp_compute *compute, const abi_tensor *node)
{
    kvp_kv *kv = kvp_kv_of(node->src[1]);
    const struct kvp_cpu_rows *rows = kvp_cpu_rows_region(kv)->rows;

    kvp_attention_note_queries(compute, node, kv, rows->knows_batch ? rows->batch : NULL);
    kvp_kv_count(kv);
}
