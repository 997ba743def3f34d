/* cuda_pending.c - rows on a GPU that are encoded later, a whole block at a time.
 *
 * A search (a trellis, chunks, feedback) takes as long for one token as for 64. So when a layer has such a codec,
 * rows that begin a block of their own wait: as fp16 in a page behind the open pages, where attention
 * reads them, and as floats beside it. When the block is full, or its sealed bytes are asked for, they
 * are encoded: the bytes are those of rows that never waited. To the tensor the block is sealed.
 *
 * Keys and values wait together, so that attention finds both under one number. A block that already
 * holds rows (imported, copied, cut) does not begin to wait. */
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "cuda_layers.h"

#define ALL_SLOTS UINT64_MAX
#define MOST_TOGETHER KVANT_CUDA_FULL_TOGETHER

bool kvant_cuda_searches(const kvant_codec *codec)
{
    const kvant_codec_view *view = kvant_codec_get_view(codec);
    return codec->info.block_tokens == 1 && codec->info.recent_tokens == 0 &&
           (view->kind == KVANT_CODES_TRELLIS || view->kind == KVANT_CODES_CHUNK || view->feedback.pivots);
}

kvant_status kvant_cuda_pending_create(cuda_layer *layer, uint32_t n_blocks)
{
    layer->waiting = kvant_alloc(layer->n_pending, sizeof *layer->waiting);
    layer->pending_of = kvant_alloc(n_blocks, sizeof *layer->pending_of);
    if (!layer->waiting || !layer->pending_of)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no memory for its tables");
    for (uint32_t i = 0; i < layer->n_pending; i++)
        layer->waiting[i].block = -1;
    for (uint32_t i = 0; i < n_blocks; i++)
        layer->pending_of[i] = KVANT_NO_PAGE;
    return KVANT_OK;
}

void kvant_cuda_pending_destroy(cuda_layer *layer)
{
    kvant_free(layer->waiting);
    kvant_free(layer->pending_of);
}

int32_t kvant_cuda_pending_of(const cuda_part *part, uint32_t block)
{
    const cuda_layer *layer = part->layer;
    const int32_t at = layer->n_pending ? layer->pending_of[block] : KVANT_NO_PAGE;
    return at >= 0 && layer->waiting[at].written[part->role] ? at : KVANT_NO_PAGE;
}

int32_t kvant_cuda_pending_take(cuda_part *part, uint32_t block, uint64_t slots)
{
    cuda_layer *layer = part->layer;
    const uint64_t written = part->tensor->blocks[block].written;
    int32_t at = layer->n_pending ? layer->pending_of[block] : KVANT_NO_PAGE;
    const bool waits = at >= 0 && layer->waiting[at].written[part->role];
    if (!layer->n_pending || (!waits && (written != slots || slots == ALL_SLOTS)))
        return KVANT_NO_PAGE;
    for (uint32_t i = 0; at < 0 && i < layer->n_pending; i++)
        if (layer->waiting[i].block < 0)
            at = (int32_t)i;
    if (at < 0)
        return KVANT_NO_PAGE;
    layer->pending_of[block] = at;
    layer->waiting[at].block = block;
    layer->waiting[at].written[part->role] |= slots;
    return at;
}

void kvant_cuda_pending_forget(cuda_part *part, uint32_t block)
{
    const int32_t at = kvant_cuda_pending_of(part, block);
    cuda_waiting *waiting = at >= 0 ? &part->layer->waiting[at] : NULL;
    if (!waiting)
        return;
    waiting->written[part->role] = 0;
    if (waiting->written[!part->role])
        return;
    waiting->block = -1;
    part->layer->pending_of[block] = KVANT_NO_PAGE;
}

kvant_cuda_pages kvant_cuda_pending_pages(const cuda_part *part)
{
    kvant_cuda_pages pages = kvant_cuda_pages_of(part, true);
    pages.base = (uint8_t *)pages.base + part->layer->first_pending * pages.block_stride;
    return pages;
}

/* Encodes a block's rows of the roles that roles[] names. */
static void encode(cuda_layer *layer, uint32_t at, const bool roles[2])
{
    const cuda_waiting *waiting = &layer->waiting[at];
    cuda_memory *memory = layer->parts[0].memory;
    const kvant_tensor *tensor = layer->parts[0].tensor;
    const size_t rows = (size_t)KVANT_PAGE_TOKENS * tensor->head_dim;
    const uint64_t written = waiting->written[roles[KVANT_ROLE_K] ? KVANT_ROLE_K : KVANT_ROLE_V];
    int64_t slots[KVANT_PAGE_TOKENS];
    kvant_cuda_append_args args = { .size = sizeof args,
                                    .type = KVANT_CUDA_F32,
                                    .n_tokens = KVANT_PAGE_TOKENS,
                                    .n_kv_heads = tensor->n_kv_heads,
                                    .slots = memory->arguments->waiting,
                                    .refused = memory->refused,
                                    .transformed = 1 };
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
        slots[i] = written >> i & 1 ? waiting->block * KVANT_PAGE_TOKENS + i : -1;
    for (int role = 0; role < 2; role++) {
        const cuda_part *part = &layer->parts[role];
        if (roles[role])
            *(role == KVANT_ROLE_K ? &args.k : &args.v) =
                (kvant_cuda_rows){ .codec = part->codec,
                                   .pages = kvant_cuda_pages_of(part, false),
                                   .rows = part->exact + at * tensor->n_kv_heads * rows,
                                   .token_stride = tensor->head_dim,
                                   .head_stride = rows };
    }
    args.k_feedback = roles[KVANT_ROLE_K] ? layer->parts[KVANT_ROLE_K].feedback : NULL;
    kvant_cuda_note(memory, kvant_cuda_memory_copy(memory->arguments->waiting, slots, sizeof slots, memory->stream),
                    "append");
    kvant_cuda_note(memory, kvant_cuda_append(&args, memory->stream), "append");
}

void kvant_cuda_pending_settle(cuda_part *part, uint32_t block)
{
    const int32_t at = kvant_cuda_pending_of(part, block);
    const bool roles[2] = { part->role == KVANT_ROLE_K, part->role == KVANT_ROLE_V };
    if (at >= 0)
        encode(part->layer, (uint32_t)at, roles);
}

/* Full blocks of a role, one launch for both where they are the same. */
static uint32_t find_full(const cuda_layer *layer, int role, int32_t arrays[2][MOST_TOGETHER])
{
    uint32_t n = 0;
    for (uint32_t at = 0; at < layer->n_pending && n < MOST_TOGETHER; at++)
        if (layer->waiting[at].block >= 0 && layer->waiting[at].written[role] == ALL_SLOTS) {
            arrays[0][n] = (int32_t)at;
            arrays[1][n++] = (int32_t)layer->waiting[at].block;
        }
    return n;
}

static void encode_full(cuda_layer *layer, const bool roles[2], int32_t arrays[2][MOST_TOGETHER], uint32_t n)
{
    cuda_memory *memory = layer->parts[0].memory;
    kvant_cuda_seal_args args = { .size = sizeof args,
                                  .n_blocks = n,
                                  .n_kv_heads = layer->parts[0].tensor->n_kv_heads,
                                  .from = memory->arguments->full[0],
                                  .to = memory->arguments->full[1],
                                  .refused = memory->refused,
                                  .k_feedback = roles[KVANT_ROLE_K] ? layer->parts[KVANT_ROLE_K].feedback : NULL,
                                  .exact = 1 };
    for (int role = 0; role < 2; role++) {
        cuda_part *part = &layer->parts[role];
        const size_t page = (size_t)KVANT_PAGE_TOKENS * part->tensor->head_dim * sizeof(float);
        if (roles[role])
            *(role == KVANT_ROLE_K ? &args.k : &args.v) =
                (kvant_cuda_seal_pages){ .codec = part->codec,
                                         .open = { part->exact, part->tensor->n_kv_heads * page, page },
                                         .sealed = kvant_cuda_pages_of(part, false) };
    }
    kvant_cuda_note(memory, kvant_cuda_memory_copy(memory->arguments->full, arrays, sizeof memory->arguments->full, memory->stream),
                    "append");
    kvant_cuda_note(memory, kvant_cuda_seal(&args, memory->stream), "append");
    for (uint32_t i = 0; i < 2 * n; i++)
        if (roles[i % 2])
            kvant_cuda_pending_forget(&layer->parts[i % 2], (uint32_t)arrays[1][i / 2]);
}

void kvant_cuda_pending_settle_full(cuda_layer *layer)
{
    int32_t arrays[2][2][MOST_TOGETHER];
    for (;;) {
        const uint32_t n[2] = { find_full(layer, 0, arrays[0]), find_full(layer, 1, arrays[1]) };
        const bool same = n[0] == n[1] && memcmp(arrays[0][0], arrays[1][0], n[0] * sizeof(int32_t)) == 0;
        if (!n[0] && !n[1])
            return;
        for (int role = 0; role < (same ? 1 : 2); role++)
            if (n[role])
                encode_full(layer, (const bool[]){ same || role == 0, same || role == 1 }, arrays[role], n[role]);
    }
}
