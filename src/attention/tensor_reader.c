/* tensor_reader.c - the public call for tensors: checks arguments and reads pages of tensors for
 * the work items of attention. */
#include <string.h>

#include "../base/attributes.h"
#include "../base/error.h"
#include "../blocks/format.h"
#include "../cache/center.h"
#include "../cache/shift.h"
#include "work_item.h"

/* Up to this many query rows, the rows of open pages are multiplied one by one. v_tile then has
 * room for their weights and sums. */
#define DIRECT_ROWS 8u

/* `times` and `scale` are separate functions because `restrict` on their arguments lets the
 * compiler vectorise the loops. */
static void times(uint32_t n, const float *restrict x, const float *restrict factors,
                  float *restrict out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = x[i] * factors[i];
}

static void scale(uint32_t n, const float *restrict x, float factor, float *restrict out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = x[i] * factor;
}

/* The query for keys with a shift: rotated back by the shift, in room. Returns q when there is no
 * shift. */
static const float *rotate_query(const kvant_attention_plan *plan, uint32_t shift, const float *q,
                                 float *room)
{
    if (!shift)
        return q;
    memcpy(room, q, plan->k->head_dim * sizeof *q);
    kvant_shift_rotate(plan->k->shifts, shift, true, room);
    return room;
}

/* Transforms n query rows of a kv head (plan.h) from `row` on. */
static void read_rows(const kvant_attention_plan *plan, const kvant_kernels *kernels, uint32_t view,
                      uint32_t kv_head, uint32_t row, uint32_t n, float *out, float *offsets,
                      float *products)
{
    const kvant_attention_problem *p = &plan->problem;
    const uint32_t d = plan->k->head_dim, number = plan->k_views.transform_id[view],
                   group = plan->group_heads;
    const kvant_affine affine = kvant_tensor_transform_affine(plan->k, number, kv_head);
    float x[KVANT_TRANSFORM_TOGETHER], y[KVANT_TRANSFORM_TOGETHER], room[KVANT_MAX_HEAD_DIM];
    for (uint32_t r = 0; r < n; r++) {
        const float *given = p->q + (row + r) / group * p->q_token_stride +
                             (kv_head * group + (row + r) % group) * p->q_head_stride;
        const float *q = rotate_query(plan, plan->k_views.shift[view], given, room);
        if (affine.scale)
            times(d, q, affine.scale, x + r * d);
        else
            memcpy(x + r * d, q, d * sizeof *x);
        offsets[r] = affine.center ? kernels->dot(q, affine.center, d) * plan->score_scale : 0;
        if (products && kvant_tensor_transform_centers(plan->k, number))
            kvant_center_products(plan->k, number, kv_head, q, plan->score_scale,
                                  products + (size_t)r * plan->k_dim);
    }
    kvant_transform_dual(kvant_tensor_head_transform(plan->k, number, kv_head), kernels, n, x, y);
    for (uint32_t r = 0; r < n; r++, out += plan->k_dim) {
        scale(d, y + r * d, plan->score_scale, out);
        memset(out + d, 0, (plan->k_dim - d) * sizeof *out);
    }
}

/* Transforms the query rows of a kv head for a view, as many at a time as kvant_transform_dual
 * prefers. */
static void read_queries(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         uint32_t view, uint32_t query, uint32_t n, uint32_t kv_head, float *out,
                         float *offsets, float *products)
{
    const uint32_t first = query * plan->group_heads, rows = n * plan->group_heads,
                   most = KVANT_TRANSFORM_TOGETHER / plan->k->head_dim;
    for (uint32_t r = 0; r < rows; r += most)
        read_rows(plan, kernels, view, kv_head, first + r, rows - r < most ? rows - r : most,
                  out + (size_t)r * plan->k_dim, offsets + r,
                  products ? products + (size_t)r * plan->k_dim : NULL);
}

/* The centres of the position bucket that the block of a page has its centre from, or NULL when the
 * block has no centre. */
static const kvant_centers *centers_of(const kvant_attention_plan *plan, uint32_t page)
{
    const int64_t block = kvant_attention_block(plan, page);
    return block < 0 ? NULL : kvant_block_centers(plan->k, (uint32_t)block);
}

/* The position of a block that has a centre. */
static int32_t position_of(const kvant_attention_plan *plan, uint32_t page)
{
    return plan->k->blocks[kvant_attention_block(plan, page)].position;
}

static uint32_t end_of_chunk(const kvant_attention_plan *plan, uint32_t first)
{
    return plan->n_pages - first < KVANT_ATTENTION_CHUNK ? plan->n_pages
                                                         : first + KVANT_ATTENTION_CHUNK;
}

/* Whether the blocks of a chunk are consecutive and their centres rotate at the same speeds as
 * `of`. *position becomes the position of the chunk's first page. */
static bool is_in_order(const kvant_attention_plan *plan, uint32_t first, const kvant_centers *of,
                        int64_t *position)
{
    const kvant_centers *last = of;
    bool any = false;
    for (uint32_t page = first; page < end_of_chunk(plan, first); page++) {
        const kvant_centers *own = centers_of(plan, page);
        if (!own)
            continue;
        const int64_t at = position_of(plan, page) - (int64_t)KVANT_PAGE_TOKENS * (page - first);
        if ((any && at != *position) || (own != last && !kvant_centers_same_rope(own, of)))
            return false;
        *position = at;
        last = own;
        any = true;
    }
    return any;
}

/* The first centres that any view's transform has. The centres of most other transforms rotate at
 * the same speeds. */
static const kvant_centers *first_centers(const kvant_attention_plan *plan)
{
    const kvant_centers *centers = NULL;
    for (uint32_t i = 0; i < plan->k_views.n && !centers; i++)
        centers = kvant_tensor_transform_centers(plan->k, plan->k_views.transform_id[i]);
    return centers;
}

/* Writes the phase of a page to its column of the chunk. */
static void fill_phase(const kvant_rope_rotation *rotation, float *to)
{
    const size_t n = rotation->n;
    for (size_t i = 0; i < n; i++) {
        to[i * KVANT_ATTENTION_CHUNK] = rotation->cosine[i];
        to[(n + i) * KVANT_ATTENTION_CHUNK] = rotation->sine[i];
    }
}

static void begin_blocks(const kvant_centers *of, kvant_rope_rotation *rotation)
{
    kvant_rope_rotation_over(rotation, of->pairs, of->n);
    kvant_rope_rotation_expect(rotation, KVANT_PAGE_TOKENS, of->step, of->step + of->n);
}

/* Fills a chunk page by page. Columns of hidden pages stay zero. */
static void fill_chunk(const kvant_attention_plan *plan, uint32_t first, float *phases)
{
    const kvant_centers *of = NULL;
    kvant_rope_rotation rotation;
    memset(phases, 0, (size_t)plan->k_dim * KVANT_ATTENTION_CHUNK * sizeof *phases);
    for (uint32_t page = first; page < end_of_chunk(plan, first); page++) {
        const kvant_centers *own = centers_of(plan, page);
        if (!own)
            continue;
        if (own != of)
            begin_blocks(own, &rotation);
        of = own;
        kvant_rope_rotation_move(&rotation, position_of(plan, page));
        fill_phase(&rotation, phases + page - first);
    }
}

/* Writes the phases of consecutive blocks from position 0 on. Prepares the rotation that steps from
 * one such chunk to the next. */
static void begin_chunks(const kvant_attention_plan *plan, const kvant_centers *of,
                         kvant_rope_rotation *rotation, float *phases)
{
    const uint32_t n_pages = end_of_chunk(plan, 0);
    kvant_rope_rotation blocks;
    memset(phases, 0, (size_t)plan->k_dim * KVANT_ATTENTION_CHUNK * sizeof *phases);
    begin_blocks(of, &blocks);
    for (uint32_t page = 0; page < n_pages; page++) {
        fill_phase(&blocks, phases + page);
        kvant_rope_rotation_move(&blocks, (page + (int64_t)1) * KVANT_PAGE_TOKENS);
    }
    kvant_rope_rotation_over(rotation, of->pairs, of->n);
    kvant_rope_rotation_expect(rotation, blocks.position, blocks.at.cosine, blocks.at.sine);
}

/* Fills the phases of all pages. Computing the phase of every page would cost more than the
 * products with it. Blocks are mostly consecutive, and then all chunks share the phases of the
 * first blocks. */
static void fill_phases(const kvant_attention_plan *plan, float *phases)
{
    const kvant_centers *of = first_centers(plan);
    const size_t size = kvant_attention_chunk_floats(plan);
    kvant_rope_rotation rotation;
    begin_chunks(plan, of, &rotation, phases);
    for (uint32_t first = 0; first < plan->n_pages; first += KVANT_ATTENTION_CHUNK) {
        int64_t position = 0;
        phases += size;
        phases[size - 1] = is_in_order(plan, first, of, &position);
        if (phases[size - 1] == 0) {
            fill_chunk(plan, first, phases);
            continue;
        }
        kvant_rope_rotation_move(&rotation, position);
        memcpy(phases, rotation.cosine, of->n * sizeof *phases);
        memcpy(phases + of->n, rotation.sine, of->n * sizeof *phases);
    }
}

/* Transforms the sums back and adds them to out in the order of channels. */
static void write_output(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         uint32_t transform_id, uint32_t head, const float *sums, float inverse,
                         float weight, float *out)
{
    const uint32_t kv_head = head / plan->group_heads, d = plan->v->head_dim;
    const kvant_codec *codec = plan->v->codecs[kv_head];
    const uint32_t number = plan->v_transforms.transforms[transform_id];
    const kvant_affine affine = kvant_tensor_transform_affine(plan->v, number, kv_head);
    const kvant_affine linear = { NULL, affine.scale };
    float y[KVANT_MAX_HEAD_DIM], x[KVANT_MAX_HEAD_DIM];
    uint32_t channel = 0;
    do
        y[channel] = sums[kvant_layout_row_position(&codec->layout, channel)] * inverse;
    while (++channel < d);
    kvant_transform_inverse(kvant_tensor_head_transform(plan->v, number, kv_head), kernels, &linear,
                            y, x);
    for (uint32_t i = 0; affine.center && i < d; i++)
        x[i] += weight * affine.center[i];
    for (uint32_t i = 0; i < d; i++)
        out[i] += x[i];
}

/* The view of a slot; KVANT_NO_VIEW when no query token sees such a slot. */
static uint32_t view_of(const kvant_attention_plan *plan, uint32_t block, uint32_t slot)
{
    return plan->k_views
        .number[plan->k->blocks[block].transform_id][kvant_slot_shift(plan->k, block, slot)];
}

static bool open_page(const kvant_attention_plan *plan, kvant_attention_item *item, uint32_t page)
{
    int64_t block = kvant_attention_block(plan, page);
    if (block < 0)
        return false;
    /* score_mixed sets the views of a mixed block one after another; this is the first. */
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++) {
        item->k_view = view_of(plan, (uint32_t)block, slot);
        if (item->k_view != KVANT_NO_VIEW)
            break;
    }
    item->v_transform = plan->v_transforms.number[plan->v->blocks[block].transform_id];
    return true;
}

static size_t row_bytes(const kvant_tensor *tensor)
{
    return tensor->head_dim * sizeof(uint16_t);
}

/* The tokens of an open page up to the last one that was written. */
static uint32_t written_tokens(const kvant_tensor *tensor, uint32_t block)
{
    const uint64_t written = tensor->blocks[block].written;
    uint32_t n = KVANT_PAGE_TOKENS;
    while (n > 1 && !(written >> (n - 1)))
        n--;
    return n;
}

/* Prefetches a page. Kernels read a page's lines in an order that the hardware does not foresee,
 * and the pages of all other kv heads lie before the next page of this one. Inline, because GCC
 * drops calls of a function that only prefetches: it assumes that the function has no effect. */
KVANT_INLINE void fetch(const kvant_attention_plan *plan, const kvant_tensor *tensor,
                        const kvant_attention_item *item, uint32_t page)
{
    if (page >= item->end_page || kvant_attention_block(plan, page) < 0)
        return;
    const uint32_t block = (uint32_t)kvant_attention_block(plan, page);
    const kvant_page_ref ref = kvant_tensor_page(tensor, block, item->kv_head);
    const size_t bytes =
        ref.open ? written_tokens(tensor, block) * row_bytes(tensor) : ref.codec->info.page_bytes;
    for (size_t i = 0; i < bytes; i += 64)
        KVANT_PREFETCH((const uint8_t *)ref.page + i);
}

static void begin(const kvant_attention_plan *plan, const kvant_attention_item *item)
{
    fetch(plan, plan->k, item, item->first_page);
    fetch(plan, plan->v, item, item->first_page);
}

/* Whether the fp16 rows of an open page are multiplied without a tile. With few query rows, a tile
 * would cost more than the products. */
static bool accepts_rows(const kvant_tensor *tensor, const kvant_page_ref *ref,
                         const kvant_attention_item *item)
{
    return ref->open && item->n_rows <= DIRECT_ROWS && tensor->head_dim % KVANT_BLOCK_PART == 0;
}

/* The rows of an open page up to the last one that was written. Queries see no later row. */
static kvant_block_page rows_of(const kvant_attention_plan *plan, const kvant_tensor *tensor,
                                const kvant_page_ref *ref, uint32_t page)
{
    return (kvant_block_page){ .type = KVANT_BLOCK_F16,
                               .n_tokens = written_tokens(
                                   tensor, (uint32_t)kvant_attention_block(plan, page)),
                               .head_dim = tensor->head_dim,
                               .rows = ref->page,
                               .stride = row_bytes(tensor) };
}

/* Scores the rows of an open page. The rows are in the order of tokens, the scores at
 * kvant_token_position. The scores of rows that were not written are 0, which the mask hides. */
static void score_rows(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                       kvant_attention_item *item, const kvant_page_ref *k, uint32_t page)
{
    const kvant_block_page rows = rows_of(plan, plan->k, k, page);
    float *in_order = item->k_tile;
    kernels->block_scores(&rows, kvant_item_queries(plan, item), plan->k_dim, in_order,
                          item->n_rows);
    for (uint32_t i = 0; i < item->n_rows * KVANT_PAGE_TOKENS; i++)
        item->scores[i / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS +
                     kvant_token_position(i % KVANT_PAGE_TOKENS)] =
            i % KVANT_PAGE_TOKENS < rows.n_tokens ? in_order[i] : 0;
}

static void add_rows(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                     kvant_attention_item *item, const kvant_page_ref *v, uint32_t page)
{
    const kvant_block_page rows = rows_of(plan, plan->v, v, page);
    float *weights = item->v_tile, *sums = weights + (size_t)item->n_rows * KVANT_PAGE_TOKENS;
    for (uint32_t i = 0; i < item->n_rows * KVANT_PAGE_TOKENS; i++)
        weights[i] = item->scores[i / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS +
                                  kvant_token_position(i % KVANT_PAGE_TOKENS)];
    memset(sums, 0, (size_t)item->n_rows * plan->v_dim * sizeof *sums);
    kernels->block_sums(&rows, weights, sums, plan->v_dim, item->n_rows);
    for (uint32_t row = 0; row < item->n_rows; row++)
        for (uint32_t j = 0; j < plan->v_dim; j++)
            item->sums[item->v_transform]
                      [row * plan->v_dim + kvant_layout_row_position(&v->codec->layout, j)] +=
                sums[row * plan->v_dim + j];
}

/* Rotates the products for a chunk at position 0 to a chunk whose first block has this phase. A
 * separate function, because `restrict` on its arguments lets the compiler vectorise the loop. */
static void rotate_products(uint32_t n_pairs, const float *restrict phase,
                            const float *restrict from, float *restrict to)
{
    const float *cosine = phase, *sine = phase + n_pairs;
    for (uint32_t i = 0; i < n_pairs; i++) {
        to[i] = from[i] * cosine[i] + from[n_pairs + i] * sine[i];
        to[n_pairs + i] = from[n_pairs + i] * cosine[i] - from[i] * sine[i];
    }
}

/* Computes the term that scores lack for each page of a chunk whose blocks have their own centres.
 * The tile of keys is free between two pages, so it holds the rotated products. */
static void fill_offsets(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         const kvant_attention_item *item, uint32_t chunk)
{
    const size_t k_dim = plan->k_dim;
    const uint32_t d = plan->k->head_dim;
    const size_t size = kvant_attention_chunk_floats(plan);
    float *centers = kvant_item_centers(plan, item);
    const float *start = item->phases, *own = start + (chunk + 1) * size;
    const bool in_order = own[size - 1] != 0;
    memset(centers, 0, (size_t)item->n_rows * KVANT_ATTENTION_CHUNK * sizeof(float));
    for (uint32_t row = 0, n; row < item->n_rows; row += n) {
        const float *products = kvant_item_products(plan, item) + row * k_dim;
        n = item->n_rows - row < KVANT_PAGE_TOKENS ? item->n_rows - row : KVANT_PAGE_TOKENS;
        for (uint32_t i = 0; in_order && i < n; i++)
            rotate_products(d / 2, own, products + i * k_dim, item->k_tile + i * k_dim);
        kernels->matmul(in_order ? item->k_tile : products, k_dim, in_order ? start : own,
                        KVANT_ATTENTION_CHUNK, centers + (size_t)row * KVANT_ATTENTION_CHUNK,
                        KVANT_ATTENTION_CHUNK, n, d, KVANT_ATTENTION_CHUNK);
    }
}

static void find_offsets(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         kvant_attention_item *item, uint32_t page)
{
    const uint32_t chunk = page / KVANT_ATTENTION_CHUNK;
    item->page_offsets = kvant_item_offsets(plan, item);
    item->offset_stride = 1;
    if (!plan->centered || !centers_of(plan, page))
        return;
    if (item->chunks[item->k_view] != chunk + 1)
        fill_offsets(plan, kernels, item, chunk);
    item->chunks[item->k_view] = chunk + 1;
    item->page_offsets = kvant_item_centers(plan, item) + page % KVANT_ATTENTION_CHUNK;
    item->offset_stride = KVANT_ATTENTION_CHUNK;
}

/* Scores all slots of a page for the work item's view. */
static void score_view(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                       kvant_attention_item *item, uint32_t page)
{
    kvant_page_ref k =
        kvant_tensor_page(plan->k, (uint32_t)kvant_attention_block(plan, page), item->kv_head);
    find_offsets(plan, kernels, item, page);
    if (!k.open && item->codes.k_suits) {
        if (!item->placed[item->k_view])
            kvant_attention_codes_set_queries(plan, kernels, k.codec, &item->codes, item->k_view,
                                              kvant_item_queries(plan, item), item->n_rows);
        item->placed[item->k_view] = 1;
        kvant_attention_codes_score(plan, kernels, &item->codes, item->k_view, k, item->n_rows,
                                    item->scores);
    } else if (accepts_rows(plan->k, &k, item)) {
        score_rows(plan, kernels, item, &k, page);
    } else {
        kvant_attention_unpack(kernels, &k, item->k_tile);
        kvant_attention_score_tile(plan, kernels, item);
    }
}

/* Copies the scores of `slots` from the scores of one view and adds the view's term. */
static void fill_scores(const kvant_attention_item *item, uint64_t slots, float *scores)
{
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++) {
        const uint32_t at = kvant_token_position(slot);
        for (uint32_t row = 0; slots >> slot & 1 && row < item->n_rows; row++)
            scores[row * KVANT_PAGE_TOKENS + at] = item->some_scores[row * KVANT_PAGE_TOKENS + at] +
                                                   item->page_offsets[row * item->offset_stride];
    }
}

/* Scores a page whose slots have several shifts, once for each shift that a query token sees. All
 * other slots get 0, which the mask hides. */
static void score_mixed(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                        kvant_attention_item *item, uint32_t page)
{
    static const float none = 0;
    const uint32_t block = (uint32_t)kvant_attention_block(plan, page),
                   transform_id = plan->k->blocks[block].transform_id;
    float *scores = item->scores;
    uint32_t shift;
    memset(scores, 0, (size_t)item->n_rows * KVANT_PAGE_TOKENS * sizeof *scores);
    item->scores = item->some_scores;
    for (uint64_t left = UINT64_MAX, slots; left; left &= ~slots) {
        slots = kvant_slots_alike(plan->k, block, left, &shift);
        item->k_view = plan->k_views.number[transform_id][shift];
        if (item->k_view == KVANT_NO_VIEW)
            continue;
        kvant_attention_accept_view(plan, kernels, item);
        score_view(plan, kernels, item, page);
        fill_scores(item, slots, scores);
    }
    item->scores = scores;
    item->page_offsets = &none;
    item->offset_stride = 0;
}

static void score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                  kvant_attention_item *item, uint32_t page)
{
    fetch(plan, plan->k, item, page + 1);
    if (kvant_block_is_mixed(plan->k, (uint32_t)kvant_attention_block(plan, page)))
        score_mixed(plan, kernels, item, page);
    else
        score_view(plan, kernels, item, page);
}

static void add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                kvant_attention_item *item, uint32_t page)
{
    kvant_page_ref v =
        kvant_tensor_page(plan->v, (uint32_t)kvant_attention_block(plan, page), item->kv_head);
    fetch(plan, plan->v, item, page + 1);
    if (!v.open && item->codes.v_suits) {
        kvant_attention_codes_add(plan, kernels, &item->codes, v, item->n_rows, item->scores,
                                  item->sums[item->v_transform]);
    } else if (accepts_rows(plan->v, &v, item)) {
        add_rows(plan, kernels, item, &v, page);
    } else {
        kvant_attention_unpack(kernels, &v, item->v_tile);
        kvant_attention_add_tile(plan, kernels, item);
    }
}

static const kvant_attention_reader reader = {
    .queries = read_queries,
    .phases = fill_phases,
    .output = write_output,
    .open = open_page,
    .begin = begin,
    .score = score,
    .add = add,
};

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "attention: %s", what);
}

static kvant_used_transforms find_transforms(const kvant_attention_plan *plan,
                                             const kvant_tensor *tensor)
{
    kvant_used_transforms used = { 0 };
    bool seen[KVANT_MAX_TRANSFORMS] = { false };
    for (uint32_t page = 0; page < plan->n_pages; page++) {
        int64_t block = kvant_attention_block(plan, page);
        if (block >= 0)
            seen[tensor->blocks[block].transform_id] = true;
    }
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++)
        if (seen[v]) {
            used.number[v] = (uint8_t)used.n;
            used.transforms[used.n++] = (uint8_t)v;
        }
    used.n = used.n ? used.n : 1;
    return used;
}

static void see_view(kvant_used_views *used, uint32_t transform_id, uint32_t shift)
{
    if (used->number[transform_id][shift] != KVANT_NO_VIEW)
        return;
    used->number[transform_id][shift] = (uint16_t)used->n;
    used->transform_id[used->n] = (uint8_t)transform_id;
    used->shift[used->n++] = (uint8_t)shift;
}

/* Adds the views of a block with shifts. Slots that nobody sees are left out. After a context shift
 * dropped tokens, their slots may have shifts that no visible slot has. */
static void see_shifts(kvant_attention_plan *plan, uint32_t page, uint32_t block)
{
    const bool mixed = kvant_block_is_mixed(plan->k, block);
    uint64_t seen = kvant_attention_seen(plan, page, mixed ? 0 : UINT64_MAX), slots;
    uint32_t shift;
    for (; seen; seen &= ~slots) {
        slots = kvant_slots_alike(plan->k, block, seen, &shift);
        see_view(&plan->k_views, plan->k->blocks[block].transform_id, shift);
        plan->mixed |= mixed;
    }
}

static void find_views(kvant_attention_plan *plan)
{
    memset(plan->k_views.number, 0xff, sizeof plan->k_views.number);
    for (uint32_t page = 0; page < plan->n_pages; page++) {
        const int64_t block = kvant_attention_block(plan, page);
        if (block >= 0 && !plan->k->shifts)
            see_view(&plan->k_views, plan->k->blocks[block].transform_id, 0);
        else if (block >= 0)
            see_shifts(plan, page, (uint32_t)block);
    }
    plan->k_views.n = plan->k_views.n ? plan->k_views.n : 1;
}

static kvant_status make_plan(const kvant_tensor *k, const kvant_tensor *v,
                              const kvant_attention_problem *problem, kvant_attention_plan *plan)
{
    *plan = (kvant_attention_plan){ .reader = &reader, .k = k, .v = v };
    if (!k || !v || kvant_tensor_codec_info(k)->role != KVANT_ROLE_K ||
        kvant_tensor_codec_info(v)->role != KVANT_ROLE_V)
        return invalid("k or v is NULL, or k is not a tensor of keys or v not one of values");
    if (k->n_kv_heads != v->n_kv_heads)
        return invalid("k and v differ in n_kv_heads");
    KVANT_FORWARD(kvant_attention_accept_problem(plan, problem, k->n_kv_heads));
    const uint32_t n_blocks = k->n_blocks < v->n_blocks ? k->n_blocks : v->n_blocks;
    KVANT_FORWARD(kvant_attention_check_blocks(plan, n_blocks));
    plan->k_dim = k->codecs[0]->layout.padded_dim;
    plan->v_dim = v->codecs[0]->layout.padded_dim;
    find_views(plan);
    plan->v_transforms = find_transforms(plan, v);
    for (uint32_t i = 0; i < plan->k_views.n; i++)
        plan->centered |= kvant_tensor_transform_centers(k, plan->k_views.transform_id[i]) != NULL;
    return kvant_attention_cut(plan) ? KVANT_OK
                                     : invalid("the workspace would be larger than memory can be: "
                                               "choose fewer tokens or threads");
}

kvant_status kvant_attention_workspace(const kvant_tensor *k, const kvant_tensor *v,
                                       const kvant_attention_problem *problem, size_t *bytes)
{
    kvant_attention_plan plan;
    KVANT_RETURN_IF(!bytes, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(make_plan(k, v, problem, &plan));
    *bytes = plan.total * sizeof(float);
    return KVANT_OK;
}

kvant_status kvant_attention(const kvant_tensor *k, const kvant_tensor *v,
                             const kvant_attention_problem *problem, void *workspace,
                             size_t workspace_bytes)
{
    kvant_attention_plan plan;
    KVANT_FORWARD(make_plan(k, v, problem, &plan));
    return kvant_attention_run(&plan, workspace, workspace_bytes);
}
