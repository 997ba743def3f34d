/* cuda_read.c - reads rows of a cache on a GPU, as attention sees them. It decodes whole blocks,
 * grouped by state and transform, and copies the requested rows. */
#include <string.h>

#include "../base/attributes.h"
#include "cuda_layers.h"

enum { TOGETHER = 64 }; /* blocks */

typedef struct reading {
    cuda_part *part;
    const int32_t *table;
    uint32_t n; /* blocks */
    float *rows;
} reading;

static kvant_status decode(const reading *r, uint32_t transform_id, bool open)
{
    int32_t lists[2][TOGETHER]; /* from, to */
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n; i++) {
        const int32_t block = r->table[i],
                      page = block < 0 ? 0 : kvant_cuda_page_of(r->part, (uint32_t)block);
        if (block < 0 || r->part->tensor->blocks[block].transform_id != transform_id ||
            (page >= 0) != open)
            continue;
        lists[0][n] = open ? page : block;
        lists[1][n++] = (int32_t)i;
    }
    if (!n)
        return KVANT_OK;
    cuda_memory *memory = r->part->memory;
    const kvant_tensor *tensor = r->part->tensor;
    const cuda_transform v = kvant_cuda_transform(r->part, transform_id);
    const bool dense = v.rotates;
    const int32_t *at = memory->tables.at;
    memory->n_copied = 0;
    KVANT_FORWARD(kvant_cuda_report_error(
        kvant_cuda_memory_copy(memory->tables.at, lists, sizeof lists, memory->stream),
        "copying tables"));
    const kvant_cuda_decode_args args = { .size = sizeof args,
                                          .codec = open ? v.open_codec : v.codec,
                                          .pages = kvant_cuda_pages_of(r->part, open),
                                          .blocks = at,
                                          .n_blocks = n,
                                          .n_kv_heads = tensor->n_kv_heads,
                                          .type = KVANT_CUDA_F32,
                                          .out = r->rows,
                                          .token_stride = kvant_tensor_width(tensor),
                                          .head_stride = tensor->head_dim,
                                          .center = dense ? v.rotated_center : v.center,
                                          .scale = dense ? NULL : v.scale,
                                          .inverse_key_transform =
                                              dense ? NULL : kvant_cuda_inverse_matrix(r->part, &v),
                                          .to = at + TOGETHER,
                                          .transformed = dense };
    return kvant_cuda_report_error(kvant_cuda_decode(&args, memory->stream), "reading rows");
}

/* For a dense rotation: rotates rows back, one block at a time, because each block has its
 * transform's scale. */
static kvant_status rotate_rows(const reading *r)
{
    const size_t width = kvant_tensor_width(r->part->tensor);
    for (uint32_t i = 0; i < r->n && r->part->matrix; i++) {
        kvant_cuda_rotate_rows_args args = kvant_cuda_rotation_of(r->part, true);
        if (r->table[i] < 0 ||
            !kvant_cuda_rotates(r->part, r->part->tensor->blocks[r->table[i]].transform_id))
            continue;
        args.rows = args.out = r->rows + i * KVANT_PAGE_TOKENS * width;
        args.token_stride = args.out_token_stride = width;
        args.head_stride = args.out_head_stride = r->part->tensor->head_dim;
        args.n_tokens = KVANT_PAGE_TOKENS, args.n_heads = args.n_kv_heads;
        args.after =
            kvant_cuda_transform(r->part, r->part->tensor->blocks[r->table[i]].transform_id)
                .attention_scale;
        KVANT_FORWARD(kvant_cuda_report_error(
            kvant_cuda_rotate_rows(&args, r->part->memory->stream), "reading rows"));
    }
    return KVANT_OK;
}

static kvant_status read_blocks(const reading *r, uint32_t offset, uint32_t n, float *to)
{
    const size_t width = kvant_tensor_width(r->part->tensor),
                 bytes = (size_t)r->n * KVANT_PAGE_TOKENS * width * sizeof(float);
    const kvant_cuda_stream stream = r->part->memory->stream;
    KVANT_FORWARD(
        kvant_cuda_report_error(kvant_cuda_memory_clear(r->rows, bytes, stream), "reading rows"));
    for (uint32_t i = 0; i < 2 * KVANT_MAX_TRANSFORMS; i++)
        KVANT_FORWARD(decode(r, i / 2, i % 2));
    KVANT_FORWARD(rotate_rows(r));
    return kvant_cuda_report_error(
        kvant_cuda_memory_copy(to, r->rows + offset * width, n * width * sizeof *to, stream),
        "reading rows");
}

kvant_status kvant_cuda_layers_read(const kvant_cache *cache, uint32_t layer, int32_t sequence,
                                    uint32_t first, uint32_t n, float *k, float *v)
{
    cuda_memory *memory = cache->memory;
    cuda_layer *l = kvant_cuda_layer(cache, layer);
    const size_t width = kvant_tensor_width(l->parts[0].tensor);
    KVANT_FORWARD(kvant_cuda_refused(memory));
    KVANT_FORWARD(
        kvant_cuda_grow(&memory->tables, 2 * TOGETHER * sizeof(int32_t), "allocating tables"));
    KVANT_FORWARD(kvant_cuda_grow(&memory->gathered,
                                  TOGETHER * KVANT_PAGE_TOKENS * width * sizeof(float),
                                  "allocating rows"));
    for (uint32_t done = 0, here; done < n; done += here) {
        const uint32_t offset = (first + done) % KVANT_PAGE_TOKENS,
                       most = TOGETHER * KVANT_PAGE_TOKENS - offset;
        here = n - done < most ? n - done : most;
        for (int role = 0; role < 2; role++) {
            const reading r = { .part = &l->parts[role],
                                .table = cache->sequences[sequence].table +
                                         (first + done) / KVANT_PAGE_TOKENS,
                                .n = (offset + here + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS,
                                .rows = memory->gathered.at };
            KVANT_FORWARD(
                read_blocks(&r, offset, here, (role == KVANT_ROLE_K ? k : v) + done * width));
        }
    }
    return kvant_cuda_report_error(memory->status, memory->failed);
}
