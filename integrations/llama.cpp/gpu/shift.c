/* shift.c - a context shift: keys that move to other positions and are not encoded again.
 *
 * RoPE rotates a key that moves by s positions into R(s) k. A block stores W (k - c), so with the
 * matrix W R(-s) and the centre R(s) c its codes are those of the moved keys: <q, R(s) k> is
 * <W^-T R(-s) q, W k>. So a block whose keys all move alike gets the id of another transform
 * (kvp_gpu_lineage), and its centre another position. The matrices of moved keys are made of those of
 * their range each time, so no error adds up.
 *
 * In some blocks only a part of the keys moves: behind the first tokens that stay, and where cells of
 * several sequences lie side by side. A block's transform follows most of its keys. The others are
 * decoded, rotated and stored again. In an open page that costs a rounding to fp16 for each shift, in
 * a sealed one a quantisation. So such blocks are opened while there are pages.
 *
 * Keys without a matrix, and with centres or scales that do not rotate, are left to ../ops_rope.c. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../log.h"
#include "../rope.h"

#define LARGEST_SHIFT (1 << 30) /* the sum of two is an integer, too */
#define MOST_GROUPS 64u /* of blocks that move alike: sequences times transforms. Keys of others are encoded again */
#define BLOCKS_AT_ONCE 8u /* whose keys are rotated in the computer's memory */

/* Whether all keys of a cache can move without a new encoding. */

static bool is_whole(const kvp_gpu_cells *cells)
{
    const bool full = cells->weights != NULL && cells->n_weights == (size_t)cells->head_dim * cells->head_dim;

    return full && cells->scale == NULL && (cells->center == NULL || cells->turns);
}

static bool rotates_as_centers(const kvp_gpu_centers *centers, const kvant_rope *rope)
{
    const kvant_rope *of = &centers->rope;

    return !centers->used || (of->n_dims == rope->n_dims && of->interleaved == rope->interleaved &&
                              memcmp(of->frequencies, rope->frequencies, rope->n_dims / 2 * sizeof(*of->frequencies)) == 0);
}

static bool may_move(const kvp_gpu_cache *cache)
{
    for (size_t i = 0; i < cache->n_tensors; i++)
        if (cache->tensors[i]->shape.role == KVANT_ROLE_K && !is_whole(cache->tensors[i]->cells))
            return false;
    return true;
}

/* What moves */

/* Blocks of a transform that move alike; to: their new id, or the old one where they do not move. */
typedef struct group {
    uint32_t id, n, to;
    int32_t by;
    bool moves;
} group;

typedef struct plan {
    kvp_gpu_cache *cache;
    int32_t *shifts; /* by cell */
    int32_t *by;           /* by block: most of its keys */
    group groups[MOST_GROUPS];
    uint32_t n_groups;
    uint32_t n_left[KVP_MOST_TRANSFORMS]; /* blocks that have an id and do not move to another one */
    bool fixed[KVP_MOST_TRANSFORMS];      /* an id that will not become another lineage's any more */
} plan;

static bool is_written(const kvp_gpu_cache *cache, uint32_t block, uint32_t slot)
{
    return cache->written[block] >> slot & 1;
}

static bool has_first_tokens(const kvp_gpu_cache *cache, uint32_t block)
{
    const int64_t page = kvp_gpu_page_of(cache, (int64_t)block * KVANT_PAGE_TOKENS);

    return page >= 0 && cache->pages[page].sink;
}

/* By how much most keys of a block move that move at all, and how many these are. */
static int32_t most_common(const plan *p, uint32_t block, uint32_t *most)
{
    const int32_t *shifts = p->shifts + (size_t)block * KVANT_PAGE_TOKENS;
    int32_t common = 0;

    *most = 0;
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++) {
        uint32_t n = 0;
        if (!is_written(p->cache, block, i) || shifts[i] == 0 || shifts[i] == common)
            continue;
        for (uint32_t j = i; j < KVANT_PAGE_TOKENS; j++)
            n += is_written(p->cache, block, j) && shifts[j] == shifts[i];
        if (n > *most) {
            *most = n;
            common = shifts[i];
        }
    }
    return common;
}

/* Whether some keys of a block move by another number of positions. */
static bool is_mixed(const plan *p, uint32_t block, int32_t by)
{
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
        if (is_written(p->cache, block, i) && p->shifts[(size_t)block * KVANT_PAGE_TOKENS + i] != by)
            return true;
    return false;
}

/* First tokens matter most and stay for ever, so others are rotated beside them, until they are
 * dropped. llama.cpp tells no cell without a token from one whose key stays. */
static int32_t shift_of_block(const plan *p, uint32_t block)
{
    uint32_t n_moved, n_still = 0;
    const int32_t common = most_common(p, block, &n_moved);

    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
        n_still += is_written(p->cache, block, i) && p->shifts[(size_t)block * KVANT_PAGE_TOKENS + i] == 0;
    return n_still > 0 && (n_still >= n_moved || has_first_tokens(p->cache, block)) ? 0 : common;
}

/* Opens blocks in which not all keys move alike; half of the pages are left to others. */
static bool open_mixed(const plan *p, cu_stream stream)
{
    uint32_t blocks[KVP_MOST_PAGES], n = 0;

    for (uint32_t block = 0; block < p->cache->n_blocks && n < p->cache->n_pages / 2; block++)
        if (p->cache->written[block] != 0 && is_mixed(p, block, p->by[block]))
            blocks[n++] = block;
    return n == 0 || kvp_gpu_open_blocks(p->cache, blocks, n, stream);
}

/* Groups */

static group *group_of(plan *p, uint32_t block)
{
    const uint32_t id = p->cache->ranges.of[block];

    for (uint32_t i = 0; i < p->n_groups; i++)
        if (p->groups[i].id == id && p->groups[i].by == p->by[block])
            return &p->groups[i];
    return NULL;
}

static int compare_groups(const void *a, const void *b)
{
    const group *x = a, *y = b;

    return x->n != y->n ? (x->n < y->n ? 1 : -1) : x->id < y->id ? -1 : x->id > y->id;
}

static void find_groups(plan *p)
{
    for (uint32_t block = 0; block < p->cache->n_blocks; block++) {
        const uint32_t id = p->cache->ranges.of[block];
        group *of = p->by[block] != 0 ? group_of(p, block) : NULL;
        if (p->cache->written[block] == 0)
            continue;
        p->n_left[id]++;
        p->fixed[id] = p->fixed[id] || p->by[block] == 0;
        if (of == NULL && p->by[block] != 0 && p->n_groups < MOST_GROUPS) {
            of = &p->groups[p->n_groups++];
            *of = (group){ .id = id, .to = id, .by = p->by[block] };
        }
        if (of != NULL)
            of->n++;
    }
    qsort(p->groups, p->n_groups, sizeof(*p->groups), compare_groups); /* the largest may move first */
}

/* Memory for matrices of an id in all layers. */
static bool have_memory(const kvp_gpu_cache *cache, uint32_t id)
{
    const uint32_t at = id - KVP_MOST_RANGES;
    size_t bytes = 0;
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (cache->tensors[i]->shape.role == KVANT_ROLE_K && cells->moved[at].numbers.at == NULL)
            bytes += 2 * cells->n_kv_heads * cells->most_weights * sizeof(float);
    }
    if (bytes > 0 && !kvp_gpu_are_few(cache->gpu, bytes))
        return false;
    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        ok = cache->tensors[i]->shape.role != KVANT_ROLE_K ||
             kvp_gpu_grow(cache->gpu, &cells->moved[at].numbers, 2 * cells->n_kv_heads * cells->most_weights * sizeof(float), false);
    }
    return ok;
}

/* The id that a group's blocks get: that of others with the same lineage, their own if no other block
 * has it, or a free one. KVP_MOST_TRANSFORMS: there is none. */
static uint32_t find_id(const plan *p, const group *g, kvp_gpu_lineage to)
{
    const kvp_gpu_lineage *lineages = p->cache->ranges.lineages;

    if (to.by == 0)
        return to.range;
    for (uint32_t id = KVP_MOST_RANGES; id < KVP_MOST_TRANSFORMS; id++)
        if (p->fixed[id] && lineages[id].by == to.by && lineages[id].range == to.range)
            return id;
    if (g->id >= KVP_MOST_RANGES && !p->fixed[g->id] && p->n_left[g->id] == g->n)
        return g->id;
    for (uint32_t id = KVP_MOST_RANGES; id < KVP_MOST_TRANSFORMS; id++)
        if (!p->fixed[id] && p->n_left[id] == 0)
            return have_memory(p->cache, id) ? id : KVP_MOST_TRANSFORMS;
    return KVP_MOST_TRANSFORMS;
}

static void move_groups(plan *p)
{
    kvp_gpu_lineage *lineages = p->cache->ranges.lineages;

    for (uint32_t i = 0; i < p->n_groups; i++) {
        group *g = &p->groups[i];
        const int64_t by = (int64_t)lineages[g->id].by + g->by;
        const kvp_gpu_lineage to = { lineages[g->id].range, (int32_t)by };
        const uint32_t id = by > LARGEST_SHIFT || by < -LARGEST_SHIFT ? KVP_MOST_TRANSFORMS : find_id(p, g, to);
        if (id == KVP_MOST_TRANSFORMS)
            continue;
        p->n_left[g->id] -= g->n;
        lineages[id] = to;
        p->fixed[id] = true;
        g->to = id;
        g->moves = true;
    }
}

/* The blocks' new ids. Keys of blocks that get none move as others do in a block of several shifts. */
static void renumber(plan *p)
{
    kvp_gpu_ranges *ranges = &p->cache->ranges;

    move_groups(p);
    for (uint32_t block = 0; block < p->cache->n_blocks; block++) {
        const group *g = p->cache->written[block] != 0 && p->by[block] != 0 ? group_of(p, block) : NULL;
        if (g == NULL || !g->moves) {
            p->by[block] = 0;
            continue;
        }
        ranges->of[block] = (uint8_t)g->to;
        kvp_gpu_centers_move(p->cache, block, p->by[block]);
    }
    ranges->moved = false;
    for (uint32_t id = KVP_MOST_RANGES; id < KVP_MOST_TRANSFORMS; id++) {
        if (!p->fixed[id] && p->n_left[id] == 0)
            ranges->lineages[id].by = 0;
        ranges->moved = ranges->moved || ranges->lineages[id].by != 0;
    }
    ranges->changed = true;
    ranges->n_last = 0; /* the next step is another one, even in the same cells */
}

/* Blocks whose keys do not all move alike */

static bool list_mixed(plan *p)
{
    kvp_gpu_cache *cache = p->cache;
    struct kvp_gpu_mixed *mixed;
    size_t n = 0;

    for (uint32_t block = 0; block < cache->n_blocks; block++)
        n += is_mixed(p, block, p->by[block]);
    mixed = realloc(cache->shift.mixed, (n + 1) * sizeof(*mixed));
    if (mixed == NULL)
        return false;
    cache->shift.mixed = mixed;
    cache->shift.n_mixed = n;
    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        if (!is_mixed(p, block, p->by[block]))
            continue;
        mixed->block = block;
        for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
            mixed->by[i] = is_written(cache, block, i) ? p->shifts[(size_t)block * KVANT_PAGE_TOKENS + i] - p->by[block] : 0;
        mixed++;
    }
    return true;
}

/* Codes of keys that move in open pages are of the past. */
static void note_open(kvp_gpu_cache *cache)
{
    for (size_t i = 0; i < cache->shift.n_mixed; i++) {
        const struct kvp_gpu_mixed *mixed = &cache->shift.mixed[i];
        const int64_t page = kvp_gpu_page_of(cache, (int64_t)mixed->block * KVANT_PAGE_TOKENS);
        for (uint32_t j = 0; j < KVANT_PAGE_TOKENS && page >= 0; j++)
            cache->pages[page].moved |= (uint64_t)(mixed->by[j] != 0) << j;
    }
}

/* Copies of keys that wait for a better matrix are not those of keys that moved. */
static bool note_learnt(kvp_gpu_cache *cache, const int32_t *shifts)
{
    const size_t n_cells = (size_t)cache->n_blocks * KVANT_PAGE_TOKENS;
    int64_t *moved = malloc(n_cells * sizeof(*moved));
    size_t n = 0;
    bool ok = moved != NULL;

    for (size_t i = 0; i < n_cells && ok; i++) {
        if (shifts[i] == 0 || !is_written(cache, (uint32_t)(i / KVANT_PAGE_TOKENS), i % KVANT_PAGE_TOKENS))
            continue;
        moved[n++] = (int64_t)i;
        if (cache->decoded.positions != NULL)
            cache->decoded.positions[i] += shifts[i];
    }
    ok = ok && kvp_gpu_weigh_written(cache, moved, n, NULL);
    free(moved);
    return ok;
}

static bool begin(plan *p, cu_stream stream)
{
    kvp_gpu_cache *cache = p->cache;
    bool ok;

    p->by = calloc(cache->n_blocks, sizeof(*p->by));
    for (uint32_t block = 0; block < cache->n_blocks && p->by != NULL; block++)
        p->by[block] = shift_of_block(p, block);
    ok = p->by != NULL && open_mixed(p, stream);
    if (ok) {
        find_groups(p);
        renumber(p);
    }
    ok = ok && list_mixed(p) && note_learnt(cache, p->shifts) && kvp_gpu_ranges_bring(cache, stream);
    if (ok)
        note_open(cache);
    free(p->by);
    return ok;
}

/* Matrices */

static kvant_cuda_query_args product_of(const kvp_gpu_cells *cells, const float *rotation, const float *matrices, uint32_t first,
                                        float *out)
{
    const size_t size = (size_t)cells->head_dim * cells->head_dim;
    const uint32_t left = cells->n_kv_heads - first, n = left < KVANT_CUDA_MOST_MATRICES ? left : KVANT_CUDA_MOST_MATRICES;
    kvant_cuda_query_args args = { .size = sizeof(args),
                                   .k_codec = cells->codec,
                                   .batch = cells->head_dim,
                                   .n_heads = 1,
                                   .n_kv_heads = 1,
                                   .type = KVANT_CUDA_F32,
                                   .q = rotation,
                                   .q_batch_stride = cells->head_dim,
                                   .inverse_weights = matrices + first * size,
                                   .out = out + first * size,
                                   .n_further = n - 1 };

    for (uint32_t i = 1; i < n; i++)
        args.further[i - 1] = matrices + (first + i) * size;
    return args;
}

/* Rows of a rotation are its queries. So the product of a rotation with all matrices of a layer is one
 * launch. */
static bool multiply(const kvp_gpu_cells *cells, const float *rotation, const float *matrices, float *out)
{
    kvant_status status = KVANT_OK;

    for (uint32_t first = 0; first < cells->n_kv_heads && status == KVANT_OK; first += KVANT_CUDA_MOST_MATRICES) {
        const kvant_cuda_query_args args = product_of(cells, rotation, matrices, first, out);
        status = kvant_cuda_transform_queries(&args, cells->gpu->stream);
    }
    return status == KVANT_OK;
}

/* Row i of the rotation by so many positions is what channel i of a moved key is made of. */
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

/* Row i of a matrix is what channel i adds to a product. So where keys rotate, the rows of W and of its
 * inverse rotate likewise. */
static bool make_matrices(kvp_gpu_cells *cells, struct kvp_gpu_moved *moved, kvp_gpu_lineage lineage)
{
    const size_t bytes = (size_t)cells->head_dim * cells->head_dim * sizeof(float);
    const kvp_gpu_matrix of = kvp_gpu_matrix_of(cells, lineage.range);
    float *host = malloc(bytes), *out = moved->numbers.at;
    int64_t *slots;
    float *rotation = kvp_gpu_batch_room(cells->gpu, cells->head_dim, cells->head_dim, &slots);
    bool ok = host != NULL && out != NULL && rotation != NULL && fill_rotation(cells, lineage.by, host) &&
              kvp_gpu_upload(cells->gpu, rotation, host, bytes) &&
              multiply(cells, rotation, of.weights, out) &&
              multiply(cells, rotation, of.inverse_weights, out + cells->n_kv_heads * cells->most_weights);

    /* Kernels read matrices before the kernel before them has ended. */
    ok = ok && kvp_cu_ok(kvp_cu.stream_finish(cells->gpu->stream), "matrices");
    if (ok)
        moved->of = lineage;
    free(host);
    return ok;
}

bool kvp_gpu_shift_matrices(kvp_gpu_cells *cells)
{
    bool ok = true;

    for (uint32_t id = KVP_MOST_RANGES; id < KVP_MOST_TRANSFORMS && cells->rope.size != 0 && is_whole(cells) && ok; id++) {
        const kvp_gpu_lineage lineage = cells->cache->ranges.lineages[id];
        struct kvp_gpu_moved *moved = &cells->moved[id - KVP_MOST_RANGES];
        if (lineage.by != 0 && (moved->of.by != lineage.by || moved->of.range != lineage.range))
            ok = make_matrices(cells, moved, lineage);
    }
    return ok;
}

/* Keys that move by other numbers of positions than their block */

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

/* Keys of some blocks on their way, first in GPU memory. */
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
        status = kvp_gpu_decode_blocks(p->cells, page >= 0, page >= 0 ? (size_t)page : p->mixed[i].block, 1, p->room + i * rows);
    }
    return status == KVANT_OK &&
           kvp_cu_ok(kvp_cu.copy_out(p->host, (cu_address)(uintptr_t)p->room, p->n * rows * sizeof(float), p->cells->gpu->stream),
                     "copying") &&
           kvp_cu_ok(kvp_cu.stream_finish(p->cells->gpu->stream), "copying");
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

/* Cells, for centres; or slots of rows that move, where they are stored. */
static bool bring_slots(const passing *p, bool to_store)
{
    int64_t slots[BLOCKS_AT_ONCE * KVANT_PAGE_TOKENS];

    for (size_t i = 0; i < p->n * KVANT_PAGE_TOKENS; i++) {
        const size_t at = i / KVANT_PAGE_TOKENS, row = i % KVANT_PAGE_TOKENS;
        const int64_t page = to_store ? page_of(p, at) : -1, block = page >= 0 ? page : (int64_t)p->mixed[at].block;
        slots[i] = to_store && p->mixed[at].by[row] == 0 ? -1 : block * KVANT_PAGE_TOKENS + (int64_t)row;
    }
    return kvp_gpu_upload(p->cells->gpu, p->slots, slots, p->n * KVANT_PAGE_TOKENS * sizeof(*slots));
}

static bool store(const passing *p)
{
    const size_t width = kvp_gpu_width(p->cells), n = p->n * KVANT_PAGE_TOKENS;
    bool ok = kvp_gpu_upload(p->cells->gpu, p->room, p->host, n * width * sizeof(float)) && bring_slots(p, false) &&
              kvp_gpu_center_rows(p->cells, p->room, width, n, p->slots, false, p->room) == KVANT_OK && bring_slots(p, true);

    for (size_t i = 0; i < p->n && ok; i++) {
        const kvp_gpu_run run = { i * KVANT_PAGE_TOKENS, KVANT_PAGE_TOKENS, p->cells->cache->ranges.of[p->mixed[i].block] };
        ok = kvp_gpu_append(p->cells, KVANT_ROLE_K, page_of(p, i) >= 0, p->room, run, p->slots, p->cells->gpu->refused) == KVANT_OK;
    }
    return kvp_cu_ok(kvp_cu.stream_finish(p->cells->gpu->stream), "storing rows") && ok &&
           kvp_gpu_take_word(p->cells->gpu->refused) == KVANT_OK;
}

/* They are decoded with the transform that their block has now, which moved them as its other keys. */
static bool move_mixed(const kvp_gpu_cells *cells)
{
    const struct kvp_gpu_shift *shift = &cells->cache->shift;
    const size_t width = kvp_gpu_width(cells), most = shift->n_mixed < BLOCKS_AT_ONCE ? shift->n_mixed : BLOCKS_AT_ONCE;
    passing p = { .cells = cells };
    bool ok = true;

    if (shift->n_mixed == 0)
        return true;
    p.host = malloc(most * KVANT_PAGE_TOKENS * width * sizeof(*p.host));
    p.room = kvp_gpu_batch_room(cells->gpu, most * KVANT_PAGE_TOKENS, width, &p.slots);
    ok = p.host != NULL && p.room != NULL;
    for (size_t i = 0; i < shift->n_mixed && ok; i += p.n) {
        p.mixed = shift->mixed + i;
        p.n = shift->n_mixed - i < most ? shift->n_mixed - i : most;
        ok = fetch(&p) && rotate(&p) && store(&p);
    }
    free(p.host);
    kvp_gpu_batch_done(cells->gpu);
    return ok;
}

/* Nodes: one for each layer */

/* The first layer's: what moves in all of them. False with *status OK: keys must be encoded again. */
static bool begin_shift(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_tensor *node, const kvant_rope *rope, int32_t *status)
{
    const size_t n_cells = (size_t)cache->n_blocks * KVANT_PAGE_TOKENS;
    abi_tensor shifts = { 0 };
    plan p = { .cache = cache };

    kvp_gpu_marks_notice(cache, KVANT_ERR_NONFINITE);
    if (!kvp_gpu_wait_end(cache, false, b->gpu->stream) || !kvp_gpu_fetch(b, KVP_FETCHED_KEYS, node->src[1], &shifts)) {
        *status = ABI_STATUS_FAILED;
        return true;
    }
    if (!may_move(cache) || !rotates_as_centers(&cache->ranges.centers, rope))
        return false;
    p.shifts = calloc(n_cells, sizeof(*p.shifts));
    if (p.shifts != NULL)
        memcpy(p.shifts, shifts.data, (size_t)node->ne[2] * sizeof(*p.shifts));
    *status = p.shifts != NULL && begin(&p, b->gpu->stream) ? ABI_STATUS_SUCCESS : ABI_STATUS_FAILED;
    free(p.shifts);
    cache->shift.input = node->src[1]->data;
    cache->shift.n++;
    return true;
}

static void take_rope(kvp_gpu_cells *cells, const kvant_rope *rope)
{
    const size_t bytes = rope->n_dims / 2 * sizeof(*rope->frequencies);
    const bool same = cells->rope.size != 0 && cells->rope.n_dims == rope->n_dims && cells->rope.interleaved == rope->interleaved &&
                      memcmp(cells->frequencies, rope->frequencies, bytes) == 0;

    for (uint32_t i = 0; i < KVP_MOST_MOVED && !same; i++)
        cells->moved[i].of = (kvp_gpu_lineage){ 0 };
    memcpy(cells->frequencies, rope->frequencies, bytes);
    cells->rope = *rope;
    cells->rope.frequencies = cells->frequencies;
}

bool kvp_gpu_shift(kvp_gpu_backend *b, const abi_tensor *node, int32_t *status)
{
    kvp_kv *kv = kvp_kv_of(node);
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node);
    kvp_gpu_cache *cache = cells != NULL ? cells->cache : NULL;
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_rope rope;
    bool known;

    *status = ABI_STATUS_SUCCESS;
    if (cache == NULL)
        return false; /* nothing was ever stored */
    known = kvp_rope_of_shift(kv, node, &rope, frequencies);
    if (cells->n_shifts == cache->shift.n && !(known && begin_shift(b, cache, node, &rope, status)))
        return false;
    if (*status == ABI_STATUS_SUCCESS && known && node->src[1]->data == cache->shift.input &&
        rotates_as_centers(&cache->ranges.centers, &rope)) {
        take_rope(cells, &rope);
        if (!kvp_gpu_shift_matrices(cells) || !move_mixed(cells))
            *status = ABI_STATUS_FAILED;
    } else {
        *status = ABI_STATUS_FAILED;
    }
    cells->n_shifts = cache->shift.n;
    if (*status != ABI_STATUS_SUCCESS)
        kvp_error("%s: cannot shift the context", kv->name);
    return true;
}

void kvp_gpu_shift_free(kvp_gpu_cells *cells)
{
    for (uint32_t i = 0; i < KVP_MOST_MOVED; i++) {
        kvp_gpu_release(&cells->moved[i].numbers);
        cells->moved[i].of = (kvp_gpu_lineage){ 0 };
    }
    cells->rope = (kvant_rope){ 0 };
}
