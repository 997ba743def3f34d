/* shift_keys.c - see shift.c: moves the keys of a layer. Most keys get another transform. Keys that
 * move by another number of positions than their block are decoded, rotated and stored again. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#define BLOCKS_AT_ONCE 8u /* Blocks whose keys are rotated in the computer's memory at a time. */

bool kvp_gpu_can_shift(const kvp_gpu_cells *cells)
{
    const bool full = cells->key_transform_size == (size_t)cells->head_dim * cells->head_dim;

    return full && cells->scale == NULL && (cells->center == NULL || cells->has_block_centers);
}

/* Matrices */

static kvant_cuda_kernel_query_args product_of(const kvp_gpu_cells *cells, const float *rotation,
                                               const float *matrices, uint32_t first, float *out)
{
    const size_t size = (size_t)cells->head_dim * cells->head_dim;
    const uint32_t left = cells->n_kv_heads - first,
                   n = left < KVANT_CUDA_MOST_MATRICES ? left : KVANT_CUDA_MOST_MATRICES;
    kvant_cuda_kernel_query_args args = { .size = sizeof(args),
                                          .k_codec = cells->codec,
                                          .batch = cells->head_dim,
                                          .n_heads = 1,
                                          .n_kv_heads = 1,
                                          .type = KVANT_CUDA_F32,
                                          .q = rotation,
                                          .q_batch_stride = cells->head_dim,
                                          .inverse_key_transform = matrices + first * size,
                                          .out = out + first * size,
                                          .n_further = n - 1 };

    for (uint32_t i = 1; i < n; i++)
        args.further[i - 1] = matrices + (first + i) * size;
    return args;
}

/* Multiplies the matrices of all kv heads with a rotation, in one launch: the rows of the rotation
 * take the place of queries. */
static bool multiply(const kvp_gpu_cells *cells, const float *rotation, const float *matrices,
                     float *out)
{
    kvant_status status = KVANT_OK;

    for (uint32_t first = 0; first < cells->n_kv_heads && status == KVANT_OK;
         first += KVANT_CUDA_MOST_MATRICES) {
        const kvant_cuda_kernel_query_args args = product_of(cells, rotation, matrices, first, out);
        status = kvant_cuda_kernel_transform_queries(&args, cells->gpu->stream);
    }
    return status == KVANT_OK;
}

/* Row i of the rotation says from which channels channel i of a moved key is made. */
static bool fill_rotation(const kvp_gpu_cells *cells, int32_t by, float *rotation)
{
    const size_t d = cells->head_dim;
    float phase[KVANT_MAX_HEAD_DIM];
    uint16_t pairs[KVANT_MAX_HEAD_DIM];

    if (kvant_rope_phase(&cells->rope, cells->head_dim, by, phase, pairs) != KVANT_OK)
        return false;
    memset(rotation, 0, d * d * sizeof(*rotation));
    for (size_t i = 0; i < d / 2; i++) {
        const size_t a = pairs[2 * i], b = pairs[2 * i + 1];
        rotation[a * d + a] = rotation[b * d + b] = phase[i];
        rotation[a * d + b] = -phase[d / 2 + i];
        rotation[b * d + a] = phase[d / 2 + i];
    }
    return true;
}

bool kvp_gpu_shift_reserve(kvp_gpu_cells *cells)
{
    const size_t d = cells->head_dim;
    int64_t *slots;

    if (!cells->cache->buckets.moved)
        return true;
    if (cells->rotation == NULL)
        cells->rotation = malloc(d * d * sizeof(*cells->rotation));
    return cells->rotation != NULL && kvp_gpu_batch_room(cells->gpu, d, d, &slots) != NULL;
}

/* Makes the matrices of moved keys. Row i of a matrix is the part of channel i in a product. So
 * when keys rotate, the rows of W and of its inverse rotate likewise. */
static bool make_matrices(kvp_gpu_cells *cells, struct kvp_gpu_moved *moved,
                          kvp_gpu_lineage lineage)
{
    const size_t bytes = (size_t)cells->head_dim * cells->head_dim * sizeof(float);
    kvp_gpu_matrix of = kvp_gpu_matrix_of(cells, lineage.bucket);
    float *out = moved->numbers.at;
    bool ok = out != NULL && kvp_gpu_shift_reserve(cells) &&
              fill_rotation(cells, lineage.by, cells->rotation) &&
              kvp_gpu_upload(cells->gpu, cells->gpu->batch.at, cells->rotation, bytes) &&
              kvp_gpu_expand(cells, true, &of) == KVANT_OK &&
              multiply(cells, cells->gpu->batch.at, of.key_transform, out) &&
              multiply(cells, cells->gpu->batch.at, of.inverse_key_transform,
                       out + cells->n_kv_heads * cells->most_key_transform_size);

    /* a kernel may read matrices before the preceding kernel has ended */
    ok = ok && kvp_cu_finish(cells->gpu->stream, "copying matrices");
    if (ok)
        moved->of = lineage;
    return ok;
}

bool kvp_gpu_shift_matrices(kvp_gpu_cells *cells)
{
    bool ok = true;

    for (uint32_t id = KVP_MOST_BUCKETS;
         id < KVP_MOST_TRANSFORMS && cells->rope.size != 0 && kvp_gpu_can_shift(cells) && ok;
         id++) {
        const kvp_gpu_lineage lineage = cells->cache->buckets.lineages[id];
        struct kvp_gpu_moved *moved = &cells->moved[id - KVP_MOST_BUCKETS];
        if (lineage.by != 0 && (moved->of.by != lineage.by || moved->of.bucket != lineage.bucket))
            ok = make_matrices(cells, moved, lineage);
    }
    free(cells->rotation);
    cells->rotation = NULL;
    return ok;
}

/* Keys that move by another distance than their block */

static bool rotate_row(const kvp_gpu_cells *cells, int32_t by, float *row)
{
    const size_t d = cells->head_dim;
    float phase[KVANT_MAX_HEAD_DIM];
    uint16_t pairs[KVANT_MAX_HEAD_DIM];

    if (kvant_rope_phase(&cells->rope, cells->head_dim, by, phase, pairs) != KVANT_OK)
        return false;
    for (float *x = row; x < row + kvp_gpu_width(cells); x += d)
        for (size_t i = 0; i < d / 2; i++) {
            const float a = x[pairs[2 * i]], b = x[pairs[2 * i + 1]];
            x[pairs[2 * i]] = a * phase[i] - b * phase[d / 2 + i];
            x[pairs[2 * i + 1]] = b * phase[i] + a * phase[d / 2 + i];
        }
    return true;
}

/* The keys of some blocks that are being rotated, first in GPU memory. */
typedef struct passing {
    const kvp_gpu_cells *cells;
    const struct kvp_gpu_mixed *mixed;
    size_t n;
    float *room, *host;
    int64_t *slots; /* on the GPU */
} passing;

static int64_t page_of(const passing *p, size_t i)
{
    return kvp_gpu_page_of(p->cells->cache, (int64_t)p->mixed[i].block * KVANT_PAGE_TOKENS);
}

static bool fetch(const passing *p)
{
    const size_t rows = KVANT_PAGE_TOKENS * kvp_gpu_width(p->cells);
    kvant_status status = KVANT_OK;

    for (size_t i = 0; i < p->n && status == KVANT_OK; i++) {
        const int64_t page = page_of(p, i);
        status =
            kvp_gpu_decode_blocks(p->cells, page >= 0, page >= 0 ? (size_t)page : p->mixed[i].block,
                                  1, p->room + i * rows);
    }
    return status == KVANT_OK &&
           kvp_cu_read(p->host, p->room, p->n * rows * sizeof(float), p->cells->gpu->stream);
}

static bool rotate(const passing *p)
{
    const size_t width = kvp_gpu_width(p->cells);
    bool ok = true;

    for (size_t i = 0; i < p->n * KVANT_PAGE_TOKENS && ok; i++) {
        const int32_t by = p->mixed[i / KVANT_PAGE_TOKENS].by[i % KVANT_PAGE_TOKENS];
        ok = by == 0 || rotate_row(p->cells, by, p->host + i * width);
    }
    return ok;
}

/* Brings the cells, from which centres follow, or the slots in which moving keys are stored. */
static bool upload_slots(const passing *p, bool to_store)
{
    int64_t slots[BLOCKS_AT_ONCE * KVANT_PAGE_TOKENS];

    for (size_t i = 0; i < p->n * KVANT_PAGE_TOKENS; i++) {
        const size_t at = i / KVANT_PAGE_TOKENS, row = i % KVANT_PAGE_TOKENS;
        const int64_t page = to_store ? page_of(p, at) : -1,
                      block = page >= 0 ? page : (int64_t)p->mixed[at].block;
        slots[i] =
            to_store && p->mixed[at].by[row] == 0 ? -1 : block * KVANT_PAGE_TOKENS + (int64_t)row;
    }
    return kvp_gpu_upload(p->cells->gpu, p->slots, slots,
                          p->n * KVANT_PAGE_TOKENS * sizeof(*slots));
}

static bool store(const passing *p)
{
    const size_t width = kvp_gpu_width(p->cells), n = p->n * KVANT_PAGE_TOKENS;
    bool ok =
        kvp_gpu_upload(p->cells->gpu, p->room, p->host, n * width * sizeof(float)) &&
        upload_slots(p, false) &&
        kvp_gpu_center_rows(p->cells, p->room, width, n, p->slots, false, p->room) == KVANT_OK &&
        upload_slots(p, true);

    for (size_t i = 0; i < p->n && ok; i++) {
        const kvp_gpu_run run = { i * KVANT_PAGE_TOKENS, KVANT_PAGE_TOKENS,
                                  p->cells->cache->buckets.of[p->mixed[i].block] };
        ok = kvp_gpu_append(p->cells, KVANT_ROLE_K,
                            page_of(p, i) >= 0 ? &p->cells->open_pages : NULL, p->room, run,
                            p->slots, p->cells->gpu->refused) == KVANT_OK;
    }
    ok = kvp_cu_finish(p->cells->gpu->stream, "storing rows") && ok;
    return kvp_gpu_read_word(p->cells->gpu->refused) == KVANT_OK && ok;
}

/* Decodes the keys with the transform that their block has now, so they have moved by the block's
 * distance already. */
bool kvp_gpu_shift_mixed(kvp_gpu_cells *cells)
{
    const struct kvp_gpu_shift *shift = &cells->cache->shift;
    const size_t width = kvp_gpu_width(cells),
                 most = shift->n_mixed < BLOCKS_AT_ONCE ? shift->n_mixed : BLOCKS_AT_ONCE;
    passing p = { .cells = cells };
    bool ok = true;

    if (shift->n_mixed == 0)
        return true;
    p.host = malloc(most * KVANT_PAGE_TOKENS * width * sizeof(*p.host));
    p.room = kvp_gpu_batch_room(cells->gpu, most * KVANT_PAGE_TOKENS, width, &p.slots);
    ok = p.host != NULL && p.room != NULL;
    while (cells->n_mixed < shift->n_mixed && ok) {
        p.mixed = shift->mixed + cells->n_mixed;
        p.n = shift->n_mixed - cells->n_mixed < most ? shift->n_mixed - cells->n_mixed : most;
        ok = fetch(&p) && rotate(&p) && store(&p);
        cells->n_mixed += ok ? p.n : 0;
    }
    cells->n_mixed = ok ? 0 : cells->n_mixed;
    free(p.host);
    kvp_gpu_batch_done(cells->gpu);
    return ok;
}

/* All keys that moved, in all layers: some blocks at a time, as layers share the blocks' ids */

/* Blocks of all layers that are encoded again at a time. Their keys are in GPU memory meanwhile.
 * This takes 32 MiB for 32 layers of 8 x 128. */
#define BLOCKS_OF_ALL 2u

typedef struct resetting {
    kvp_gpu_cache *cache;
    uint32_t blocks[BLOCKS_OF_ALL];
    size_t n;
    float *room;    /* for each layer: rows of sealed blocks, then of exact pages */
    int64_t *slots; /* slots on the GPU for these rows */
    int64_t numbers[2 * BLOCKS_OF_ALL * KVANT_PAGE_TOKENS];
} resetting;

static size_t rows_of(const resetting *r)
{
    return 2 * r->n * KVANT_PAGE_TOKENS;
}

/* The number of the i-th block, or of its exact page; below 0: it has none. */
static int64_t place_of(const resetting *r, size_t i)
{
    const int64_t block = r->blocks[i % r->n];

    return i < r->n ? block : kvp_gpu_page_of(r->cache, block * KVANT_PAGE_TOKENS);
}

static bool have_reset_room(resetting *r)
{
    size_t width = 0, layers = 0;

    for (size_t i = 0; i < r->cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = r->cache->tensors[i]->cells;
        layers += r->cache->tensors[i]->shape.role == KVANT_ROLE_K;
        width = kvp_gpu_width(cells) > width ? kvp_gpu_width(cells) : width;
    }
    r->room = kvp_gpu_batch_room(r->cache->gpu, layers * rows_of(r), width, &r->slots);
    for (size_t i = 0; i < rows_of(r); i++) {
        const int64_t place = place_of(r, i / KVANT_PAGE_TOKENS);
        r->numbers[i] =
            place < 0 ? -1 : place * KVANT_PAGE_TOKENS + (int64_t)(i % KVANT_PAGE_TOKENS);
    }
    return r->room != NULL &&
           kvp_gpu_upload(r->cache->gpu, r->slots, r->numbers, rows_of(r) * sizeof(*r->numbers));
}

/* Decodes the keys of a layer, or stores them again. */
static bool pass_layer(const resetting *r, const kvp_gpu_cells *cells, bool stores, float *rows)
{
    const size_t of_block = KVANT_PAGE_TOKENS * kvp_gpu_width(cells);
    kvant_status status = KVANT_OK;

    for (size_t i = 0; i < 2 * r->n && status == KVANT_OK; i++) {
        const bool open = i >= r->n;
        const kvp_gpu_run run = { i * KVANT_PAGE_TOKENS, KVANT_PAGE_TOKENS,
                                  r->cache->buckets.of[r->blocks[i % r->n]] };
        const int64_t place = place_of(r, i);
        if (place < 0)
            continue;
        if (!stores) {
            status = kvp_gpu_decode_blocks(cells, open, (size_t)place, 1, rows + i * of_block);
            continue;
        }
        status = kvp_gpu_center_blocks(cells, open, (size_t)place, 1, false, rows + i * of_block);
        if (status == KVANT_OK)
            status = kvp_gpu_append(cells, KVANT_ROLE_K, open ? &cells->open_pages : NULL, rows,
                                    run, r->slots, cells->gpu->unsealed);
    }
    return status == KVANT_OK;
}

static bool pass_all(const resetting *r, bool stores)
{
    float *rows = r->room;
    bool ok = true;

    for (size_t i = 0; i < r->cache->n_tensors && ok; i++) {
        const kvp_gpu_cells *cells = r->cache->tensors[i]->cells;
        if (r->cache->tensors[i]->shape.role != KVANT_ROLE_K)
            continue;
        ok = pass_layer(r, cells, stores, rows);
        rows += rows_of(r) * kvp_gpu_width(cells);
    }
    return kvp_cu_finish(r->cache->gpu->stream, "storing rows") && ok;
}

static bool reset_blocks(resetting *r)
{
    kvp_gpu_buckets *buckets = &r->cache->buckets;

    if (!have_reset_room(r) || !pass_all(r, false))
        return false;
    for (size_t i = 0; i < r->n; i++) {
        buckets->of[r->blocks[i]] = (uint8_t)buckets->lineages[buckets->of[r->blocks[i]]].bucket;
        kvp_gpu_centers_move(r->cache, r->blocks[i], 0);
    }
    buckets->changed = true;
    return kvp_gpu_buckets_upload(r->cache, r->cache->gpu->stream) && pass_all(r, true);
}

bool kvp_gpu_shift_reset(kvp_gpu_cache *cache)
{
    resetting r = { .cache = cache };
    bool ok = true;

    for (uint32_t block = 0; block < cache->n_blocks && ok; block++) {
        if (cache->written[block] != 0 && cache->buckets.of[block] >= KVP_MOST_BUCKETS)
            r.blocks[r.n++] = block;
        if (r.n == 0 || (r.n < BLOCKS_OF_ALL && block + 1 < cache->n_blocks))
            continue;
        ok = reset_blocks(&r);
        r.n = 0;
    }
    kvp_gpu_batch_done(cache->gpu);
    return ok;
}

/* Life */

void kvp_gpu_shift_free(kvp_gpu_cells *cells)
{
    for (uint32_t i = 0; i < KVP_MOST_MOVED; i++) {
        kvp_gpu_release(&cells->moved[i].numbers);
        cells->moved[i].of = (kvp_gpu_lineage){ 0 };
    }
    free(cells->rotation);
    cells->rotation = NULL;
    cells->rope = (kvant_rope){ 0 };
    cells->n_mixed = 0;
}
