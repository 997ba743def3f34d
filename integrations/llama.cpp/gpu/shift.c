/* shift.c - a context shift: keys that move to other positions and are not encoded again.
 *
 * RoPE rotates a key that moves by s positions into R(s) k. A block stores W (k - c). With the
 * matrix W R(-s) and the centre R(s) c the same codes stand for the moved keys, because <q, R(s) k>
 * is <W^-T R(-s) q, W k>. So a block whose keys all move by the same distance gets the id of
 * another transform (kvp_gpu_lineage), and its centre gets another position. The matrices of moved
 * keys are computed from their bucket's matrices each time, so no error adds up.
 *
 * In some blocks only a part of the keys moves: in the block with the last of the first tokens,
 * which stay, and in blocks with cells of several sequences. A block's transform follows most of
 * its keys. All other keys of the block are decoded, rotated and stored again. In an exact page
 * that costs a rounding to fp16 for each shift, which is at most 2^-11 of a number and adds up as a
 * random walk. It also costs one quantisation when the page is given up. In a sealed page it costs
 * a quantisation for each shift. So such blocks get exact pages while there are any.
 *
 * This file decides what moves, for all layers of a cache. shift_keys.c moves the keys of a layer.
 * Keys without a key transform, and keys with centres or scales that do not rotate, are left to
 * ../ops_rope.c. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../log.h"
#include "../rope.h"

#define LARGEST_SHIFT (1 << 30) /* The sum of two such shifts is an int32_t, too. */

/* The most groups of blocks that move by the same distance, which is sequences times transforms.
 * Keys of further groups are encoded again. */
#define MOST_GROUPS 64u

/* Whether all keys of a cache can move without being encoded again. */

static bool rotates_as_centers(const kvp_gpu_cache *cache, const kvant_rope *rope)
{
    const kvp_gpu_centers *centers = &cache->buckets.centers;

    return !centers->used || kvp_rope_is_same(&centers->rope, rope);
}

/* Whether the cache knows which cells have rows. Only caches that are told a step's cells before
 * its graph do. */
static bool may_move(const kvp_gpu_cache *cache)
{
    if (!cache->keeps && !cache->learns)
        return false;
    for (size_t i = 0; i < cache->n_tensors; i++)
        if (cache->tensors[i]->shape.role == KVANT_ROLE_K &&
            !kvp_gpu_can_shift(cache->tensors[i]->cells))
            return false;
    return true;
}

/* The movements of a shift */

/* Blocks with one transform that move by the same distance. to: their new id, or the old id if they
 * do not move. */
typedef struct group {
    uint32_t id, n, to;
    int32_t by;
    bool moves;
} group;

typedef struct plan {
    kvp_gpu_cache *cache;
    int32_t *shifts; /* by cell: the distance by which the key moves */
    int32_t *all;    /* the same with those that keys moved by already */
    int32_t *by;     /* by block: the distance by which most of its keys move */
    group groups[MOST_GROUPS];
    uint32_t n_groups;
    kvp_gpu_lineage lineages[KVP_MOST_TRANSFORMS]; /* lineages of ids after the shift */
    uint32_t n_left[KVP_MOST_TRANSFORMS]; /* by id: blocks that have it and get no other id */
    bool fixed[KVP_MOST_TRANSFORMS];      /* by id: the lineage does not change in this shift */
} plan;

static bool is_written(const kvp_gpu_cache *cache, uint32_t block, uint32_t slot)
{
    return cache->written[block] >> slot & 1;
}

static bool has_first_tokens(const kvp_gpu_cache *cache, uint32_t block)
{
    return kvp_gpu_page_of(cache, (int64_t)block * KVANT_PAGE_TOKENS) >= 0 &&
           kvant_plan_holds_first(cache->plan, block);
}

/* The distance by which most moving keys of a block move, and the number of these keys. */
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

/* Whether some keys of a block move by another distance. */
static bool is_mixed(const plan *p, uint32_t block, int32_t by)
{
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
        if (is_written(p->cache, block, i) &&
            p->shifts[(size_t)block * KVANT_PAGE_TOKENS + i] != by)
            return true;
    return false;
}

/* The distance of a block. First tokens matter most and stay for ever, so a block with first tokens
 * does not move. Further keys of such a block are rotated until they are dropped. llama.cpp does
 * not distinguish a cell without a token from a cell whose key stays. */
static int32_t shift_of_block(const plan *p, uint32_t block)
{
    uint32_t n_moved, n_still = 0;
    const int32_t common = most_common(p, block, &n_moved);

    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
        n_still +=
            is_written(p->cache, block, i) && p->shifts[(size_t)block * KVANT_PAGE_TOKENS + i] == 0;
    return n_still > 0 && (n_still >= n_moved || has_first_tokens(p->cache, block)) ? 0 : common;
}

/* Gives exact pages to blocks in which not all keys move by the same distance; half of the pages
 * are left to other blocks. */
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
    const uint32_t id = p->cache->buckets.of[block];

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
    p->n_groups = 0;
    memset(p->n_left, 0, sizeof(p->n_left));
    memset(p->fixed, 0, sizeof(p->fixed));
    memcpy(p->lineages, p->cache->buckets.lineages, sizeof(p->lineages));
    for (uint32_t block = 0; block < p->cache->n_blocks; block++) {
        const uint32_t id = p->cache->buckets.of[block];
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
    /* the largest group may move first */
    qsort(p->groups, p->n_groups, sizeof(*p->groups), compare_groups);
}

/* Allocates memory for the matrices of an id in all layers. */
static bool have_memory(const kvp_gpu_cache *cache, uint32_t id)
{
    const uint32_t at = id - KVP_MOST_BUCKETS;
    size_t bytes = 0;
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (cache->tensors[i]->shape.role == KVANT_ROLE_K && cells->moved[at].numbers.at == NULL)
            bytes += 2 * cells->n_kv_heads * cells->most_key_transform_size * sizeof(float);
    }
    if (bytes > 0 && !kvp_gpu_fits_free_memory(cache->gpu, bytes))
        return false;
    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        ok = cache->tensors[i]->shape.role != KVANT_ROLE_K ||
             kvp_gpu_grow(cache->gpu, &cells->moved[at].numbers,
                          2 * cells->n_kv_heads * cells->most_key_transform_size * sizeof(float),
                          false);
    }
    return ok;
}

/* The id for a group's blocks: the id of blocks with the same lineage, their own id if no other
 * block has it, or a free id. KVP_MOST_TRANSFORMS: there is none. */
static uint32_t find_id(const plan *p, const group *g, kvp_gpu_lineage to)
{
    const kvp_gpu_lineage *lineages = p->lineages;

    if (to.by == 0)
        return to.bucket;
    for (uint32_t id = KVP_MOST_BUCKETS; id < KVP_MOST_TRANSFORMS; id++)
        if (p->fixed[id] && lineages[id].by == to.by && lineages[id].bucket == to.bucket)
            return id;
    if (g->id >= KVP_MOST_BUCKETS && !p->fixed[g->id] && p->n_left[g->id] == g->n)
        return g->id;
    for (uint32_t id = KVP_MOST_BUCKETS; id < KVP_MOST_TRANSFORMS; id++)
        if (!p->fixed[id] && p->n_left[id] == 0 && have_memory(p->cache, id))
            return id;
    return KVP_MOST_TRANSFORMS;
}

/* Assigns ids to groups. False: not all groups can move. */
static bool move_groups(plan *p)
{
    kvp_gpu_lineage *lineages = p->lineages;
    bool all = true;

    for (uint32_t i = 0; i < p->n_groups; i++) {
        group *g = &p->groups[i];
        const int64_t by = (int64_t)lineages[g->id].by + g->by;
        const kvp_gpu_lineage to = { lineages[g->id].bucket, (int32_t)by };
        const uint32_t id =
            by > LARGEST_SHIFT || by < -LARGEST_SHIFT ? KVP_MOST_TRANSFORMS : find_id(p, g, to);
        all = all && id != KVP_MOST_TRANSFORMS;
        if (id == KVP_MOST_TRANSFORMS)
            continue;
        p->n_left[g->id] -= g->n;
        lineages[id] = to;
        p->fixed[id] = true;
        g->to = id;
        g->moves = true;
    }
    return all;
}

/* Finds ids for all groups. If there are too few ids, all keys that moved before are encoded once
 * more, which makes all ids free. In a long conversation that happens once in many shifts. Blocks
 * whose tokens were dropped keep their ids until they get other rows. */
static bool find_ids(plan *p)
{
    find_groups(p);
    if (move_groups(p) || !p->cache->buckets.moved)
        return true;
    if (!kvp_gpu_shift_reset(p->cache))
        return false;
    find_groups(p);
    move_groups(p);
    return true;
}

/* Sets the blocks' new ids. In blocks that get none, all moving keys are stored again, as in blocks
 * whose keys move by different distances. */
static void change_ids(plan *p)
{
    kvp_gpu_buckets *buckets = &p->cache->buckets;

    for (uint32_t block = 0; block < p->cache->n_blocks; block++) {
        const group *g =
            p->cache->written[block] != 0 && p->by[block] != 0 ? group_of(p, block) : NULL;
        if (g == NULL || !g->moves) {
            p->by[block] = 0;
            continue;
        }
        buckets->of[block] = (uint8_t)g->to;
        kvp_gpu_centers_move(p->cache, block, p->by[block]);
    }
    memcpy(buckets->lineages, p->lineages, sizeof(buckets->lineages));
    buckets->moved = false;
    for (uint32_t id = KVP_MOST_BUCKETS; id < KVP_MOST_TRANSFORMS; id++) {
        if (!p->fixed[id] && p->n_left[id] == 0)
            buckets->lineages[id].by = 0;
        buckets->moved = buckets->moved || buckets->lineages[id].by != 0;
    }
    buckets->changed = true;
    buckets->n_last = 0; /* the next step is a new one, even in the same cells */
}

/* Blocks whose keys move by different distances */

/* Room for all blocks in which some keys move. */
static bool have_mixed(plan *p)
{
    kvp_gpu_cache *cache = p->cache;
    struct kvp_gpu_mixed *mixed;
    size_t n = 0;

    for (uint32_t block = 0; block < cache->n_blocks; block++)
        n += is_mixed(p, block, 0);
    mixed = realloc(cache->shift.mixed, (n + 1) * sizeof(*mixed));
    cache->shift.mixed = mixed != NULL ? mixed : cache->shift.mixed;
    return mixed != NULL;
}

static void list_mixed(plan *p)
{
    kvp_gpu_cache *cache = p->cache;
    struct kvp_gpu_mixed *mixed = cache->shift.mixed;

    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        if (!is_mixed(p, block, p->by[block]))
            continue;
        mixed->block = block;
        for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
            mixed->by[i] = is_written(cache, block, i)
                               ? p->shifts[(size_t)block * KVANT_PAGE_TOKENS + i] - p->by[block]
                               : 0;
        mixed++;
    }
    cache->shift.n_mixed = (size_t)(mixed - cache->shift.mixed);
}

/* Marks the codes of moving keys in exact pages as out of date. */
static void note_open(kvp_gpu_cache *cache)
{
    for (size_t i = 0; i < cache->shift.n_mixed; i++) {
        const struct kvp_gpu_mixed *mixed = &cache->shift.mixed[i];
        const int64_t page = kvp_gpu_page_of(cache, (int64_t)mixed->block * KVANT_PAGE_TOKENS);
        for (uint32_t j = 0; j < KVANT_PAGE_TOKENS && page >= 0; j++)
            cache->pages[page].moved |= (uint64_t)(mixed->by[j] != 0) << j;
    }
}

/* Sets a block's position from most of its rows, for the rows that it gets next. */
static void note_positions(const plan *p)
{
    uint32_t n;

    for (uint32_t block = 0; block < p->cache->n_blocks && p->cache->plan != NULL; block++)
        kvant_plan_shift(p->cache->plan, block, most_common(p, block, &n));
}

static bool begin(plan *p, cu_stream stream)
{
    kvp_gpu_cache *cache = p->cache;
    bool ok;

    p->by = calloc(cache->n_blocks, sizeof(*p->by));
    for (uint32_t block = 0; block < cache->n_blocks && p->by != NULL; block++)
        p->by[block] = shift_of_block(p, block);
    ok = p->by != NULL && have_mixed(p) && open_mixed(p, stream) && find_ids(p);
    if (ok) {
        change_ids(p);
        list_mixed(p);
        ok = kvp_gpu_buckets_upload(cache, stream);
        note_open(cache);
        note_positions(p);
    }
    free(p->by);
    return ok;
}

/* Nodes: one for each layer */

/* Whether the keys of a layer that moved before were rotated by this RoPE. */
static bool has_rope(const kvp_gpu_cells *cells, const kvant_rope *rope)
{
    return cells->rope.size != 0 && kvp_rope_is_same(&cells->rope, rope);
}

static void read_rope(kvp_gpu_cells *cells, const kvant_rope *rope)
{
    for (uint32_t i = 0; i < KVP_MOST_MOVED && !has_rope(cells, rope); i++)
        cells->moved[i].of = (kvp_gpu_lineage){ 0 };
    memcpy(cells->frequencies, rope->frequencies, rope->n_dims / 2 * sizeof(*rope->frequencies));
    cells->rope = *rope;
    cells->rope.frequencies = cells->frequencies;
}

/* A layer's keys move as the plan says. After an error they have not moved. */
static bool move_layer(kvp_gpu_cells *cells, const kvant_rope *rope)
{
    read_rope(cells, rope);
    if (!kvp_gpu_shift_matrices(cells) || !kvp_gpu_shift_mixed(cells))
        return false;
    cells->n_shifts = cells->cache->shift.n;
    return true;
}

/* Layers that a shift left as they were, because it failed before or in them, move now. */
static bool finish_shift(const kvp_gpu_cache *cache, const kvant_rope *rope)
{
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        ok = cache->tensors[i]->shape.role != KVANT_ROLE_K || cells->n_shifts == cache->shift.n ||
             move_layer(cells, rope);
    }
    return ok;
}

/* After an error llama.cpp computes the shift once more, and adds shifts that came since. Keys have
 * moved by the former shift already, which is subtracted. */
static bool read_shifts(kvp_gpu_cache *cache, const abi_tensor *from, size_t n, plan *p)
{
    const size_t n_cells = (size_t)cache->n_blocks * KVANT_PAGE_TOKENS;
    int32_t *all = calloc(n_cells, sizeof(*all));

    p->shifts = calloc(n_cells, sizeof(*p->shifts));
    if (all == NULL || p->shifts == NULL) {
        free(all);
        return false;
    }
    memcpy(all, from->data, n * sizeof(*all));
    for (size_t i = 0; i < n_cells; i++)
        p->shifts[i] = all[i] - (cache->shift.failed ? cache->shift.all[i] : 0);
    p->all = all;
    return true;
}

/* Plans the shift of all layers, at the first layer's node. False: keys must be encoded again. */
static bool begin_shift(kvp_gpu_backend *b, const kvp_gpu_cells *cells, const abi_tensor *node,
                        const kvant_rope *rope, int32_t *status)
{
    kvp_gpu_cache *cache = cells->cache;
    abi_tensor shifts = { 0 };
    plan p = { .cache = cache };

    kvp_gpu_marks_notice(cache, KVANT_ERR_NONFINITE);
    if (!kvp_gpu_first_matrix_settle(cache) ||
        !kvp_gpu_fetch(b, KVP_FETCHED_KEYS, node->src[1], &shifts)) {
        *status = ABI_STATUS_FAILED;
        return true;
    }
    if (!may_move(cache) || !rotates_as_centers(cache, rope))
        return false;
    if (cache->buckets.moved && !has_rope(cells, rope) && !kvp_gpu_shift_reset(cache)) {
        *status = ABI_STATUS_FAILED;
        return true;
    }
    if ((!cache->shift.failed || finish_shift(cache, rope)) &&
        read_shifts(cache, &shifts, (size_t)node->ne[2], &p) && begin(&p, b->gpu->stream)) {
        free(cache->shift.all);
        cache->shift.all = p.all;
        p.all = NULL;
        cache->shift.failed = false;
        cache->shift.input = node->src[1]->data;
        cache->shift.n++;
    } else {
        *status = ABI_STATUS_FAILED;
    }
    free(p.all);
    free(p.shifts);
    return true;
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
    if ((cells->n_shifts == cache->shift.n || cache->shift.failed) &&
        !(known && begin_shift(b, cells, node, &rope, status)))
        return false;
    if (*status == ABI_STATUS_SUCCESS &&
        !(known && node->src[1]->data == cache->shift.input && rotates_as_centers(cache, &rope) &&
          move_layer(cells, &rope))) {
        *status = ABI_STATUS_FAILED;
        cache->shift.failed = true;
    }
    cache->shift.due = *status != ABI_STATUS_SUCCESS;
    if (cache->shift.due)
        kvp_error("%s: the GPU could not shift the context; it tries again before the next step",
                  kv->name);
    return true;
}
