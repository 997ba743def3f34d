/* tensor_reader.c - the public call for tensors: checks arguments and reads pages of tensors for
 * the work items of attention. */
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "../base/abi.h"
#include "../base/attributes.h"
#include "../base/error.h"
#include "../blocks/format.h"
#include "../cache/center.h"
#include "../cache/learning.h"
#include "../cache/shift.h"
#include "block_centers.h"
#include "work_item.h"

/* Up to this many query rows, the rows of open pages are multiplied one by one. v_tile then has
 * room for their weights and sums. */
#define DIRECT_ROWS 8u

/* Lines that are prefetched at a time, four times per page. A page of 64 rows with head_dim 64 and
 * 4 bits has 34 lines of keys and as many of values. CPUs keep track of 10 to 16 lines. With half
 * as many lines a page comes too late, and with all of them at once CPUs wait longer. */
#define LINES_AT_ONCE 18u

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

/* Sets the lines that fetch_some prefetches next: the page of a kv head. */
static void look_ahead(const kvant_attention_plan *plan, const kvant_tensor *tensor,
                       const kvant_attention_item *item, uint32_t page, kvant_ahead *ahead)
{
    *ahead = (kvant_ahead){ NULL, NULL };
    if (page >= item->end_page || kvant_attention_block(plan, page) < 0)
        return;
    const uint32_t block = (uint32_t)kvant_attention_block(plan, page);
    const kvant_page_ref ref = kvant_tensor_page(tensor, block, item->kv_head);
    ahead->at = ref.page;
    ahead->end = ahead->at + (ref.open ? written_tokens(tensor, block) * row_bytes(tensor)
                                       : ref.codec->info.page_bytes);
}

/* Prefetches some lines. Kernels read a page's lines in an order that the hardware does not
 * foresee, and the pages of all other kv heads lie before the next page of this one. A CPU waits
 * when it has asked for more lines than it can keep track of, so few are asked for at a time. */
static void fetch_some(kvant_ahead *ahead, uint32_t *left)
{
    for (; ahead->at < ahead->end && *left; ahead->at += 64, --*left)
        KVANT_PREFETCH(ahead->at);
}

/* first: which of keys and values are needed sooner. */
static void fetch(kvant_attention_item *item, uint32_t first)
{
    uint32_t left = LINES_AT_ONCE;
    fetch_some(&item->ahead[first], &left);
    fetch_some(&item->ahead[1 - first], &left);
}

static void begin(const kvant_attention_plan *plan, kvant_attention_item *item)
{
    look_ahead(plan, plan->k, item, item->first_page, &item->ahead[0]);
    look_ahead(plan, plan->v, item, item->first_page, &item->ahead[1]);
    fetch(item, 0);
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

/* Moves 64 numbers between the order of tokens and the order of positions. Token 16 i + j has
 * position 4 j + i (kvant_token_position). Separate functions, because `restrict` on their
 * arguments lets the compiler vectorise the loops. */
static void place_tokens(const float *restrict tokens, float *restrict positions)
{
    for (uint32_t j = 0; j < 16; j++)
        for (uint32_t i = 0; i < 4; i++)
            positions[4 * j + i] = tokens[16 * i + j];
}

static void order_tokens(const float *restrict positions, float *restrict tokens)
{
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t j = 0; j < 16; j++)
            tokens[16 * i + j] = positions[4 * j + i];
}

static void add_placed(uint32_t n, const float *restrict x, const uint16_t *restrict positions,
                       float *restrict sums)
{
    for (uint32_t i = 0; i < n; i++)
        sums[positions[i]] += x[i];
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
    for (uint32_t row = 0; row < item->n_rows; row++, in_order += KVANT_PAGE_TOKENS) {
        for (uint32_t t = rows.n_tokens; t < KVANT_PAGE_TOKENS; t++)
            in_order[t] = 0;
        place_tokens(in_order, item->scores + (size_t)row * KVANT_PAGE_TOKENS);
    }
}

static void add_rows(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                     kvant_attention_item *item, const kvant_page_ref *v, uint32_t page)
{
    const kvant_block_page rows = rows_of(plan, plan->v, v, page);
    float *weights = item->v_tile, *sums = weights + (size_t)item->n_rows * KVANT_PAGE_TOKENS;
    for (uint32_t row = 0; row < item->n_rows; row++)
        order_tokens(item->scores + (size_t)row * KVANT_PAGE_TOKENS,
                     weights + (size_t)row * KVANT_PAGE_TOKENS);
    memset(sums, 0, (size_t)item->n_rows * plan->v_dim * sizeof *sums);
    kernels->block_sums(&rows, weights, sums, plan->v_dim, item->n_rows);
    for (uint32_t row = 0; row < item->n_rows; row++)
        add_placed(plan->v_dim, sums + (size_t)row * plan->v_dim, v->codec->layout.positions,
                   item->sums[item->v_transform] + (size_t)row * plan->v_dim);
}

/* Scores all slots of a page for the work item's view. */
static void score_view(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                       kvant_attention_item *item, uint32_t page)
{
    kvant_page_ref k =
        kvant_tensor_page(plan->k, (uint32_t)kvant_attention_block(plan, page), item->kv_head);
    kvant_attention_find_offsets(plan, kernels, item, page);
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
    look_ahead(plan, plan->k, item, page + 1, &item->ahead[0]);
    fetch(item, 1);
    if (kvant_block_is_mixed(plan->k, (uint32_t)kvant_attention_block(plan, page)))
        score_mixed(plan, kernels, item, page);
    else
        score_view(plan, kernels, item, page);
    fetch(item, 1);
}

static void add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                kvant_attention_item *item, uint32_t page)
{
    kvant_page_ref v =
        kvant_tensor_page(plan->v, (uint32_t)kvant_attention_block(plan, page), item->kv_head);
    look_ahead(plan, plan->v, item, page + 1, &item->ahead[1]);
    fetch(item, 0);
    if (!v.open && item->codes.v_suits) {
        kvant_attention_codes_add(plan, kernels, &item->codes, v, item->n_rows, item->scores,
                                  item->sums[item->v_transform]);
    } else if (accepts_rows(plan->v, &v, item)) {
        add_rows(plan, kernels, item, &v, page);
    } else {
        kvant_attention_unpack(kernels, &v, item->v_tile);
        kvant_attention_add_tile(plan, kernels, item);
    }
    fetch(item, 0);
}

static const kvant_attention_reader reader = {
    .queries = read_queries,
    .phases = kvant_attention_fill_phases,
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

/* The row of a step, which attention's loop writes. */
typedef struct row_write {
    const kvant_attention_problem *problem;
    kvant_attention_step *step;
    kvant_write write;
    kvant_status noted;
    bool closed;
} row_write;

/* Notes the token's queries, which later rows learn from. */
static kvant_status note_queries(kvant_tensor *k, const kvant_attention_problem *problem,
                                 kvant_attention_step *step)
{
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = problem->q,
                                    .token_stride = problem->q_token_stride,
                                    .head_stride = problem->q_head_stride,
                                    .n_tokens = problem->n_queries,
                                    .n_heads = problem->n_heads,
                                    .positions = step->position };
    if (!step->position)
        return KVANT_OK;
    step->position = NULL;
    return kvant_tensor_note_queries(k, &queries, problem->n_threads);
}

/* Ends the write, and notes the queries if that takes no loop. */
static void close_write(void *user)
{
    row_write *row = user;
    kvant_tensor *k = row->write.jobs[0].tensor;
    row->step->stored = kvant_write_close(&row->write, KVANT_OK) == KVANT_OK;
    row->closed = true;
    if (kvant_queries_only_copies(k, row->problem->n_heads))
        row->noted = note_queries(k, row->problem, row->step);
}

/* Attends to the tensors in a workspace of the caller's. The same loop writes the row. */
static kvant_status attend(const kvant_tensor *k, const kvant_tensor *v,
                           const kvant_attention_problem *problem, const kvant_attention_step *step,
                           row_write *row)
{
    kvant_attention_plan plan;
    KVANT_FORWARD(make_plan(k, v, problem, &plan));
    void *workspace = step->workspace(step->user, plan.total * sizeof(float));
    KVANT_RETURN_IF(!workspace, KVANT_ERR_MEMORY);
    if (row) {
        plan.write = &row->write;
        plan.written_block = (uint32_t)(step->slot / KVANT_PAGE_TOKENS);
        plan.beside = close_write;
        plan.user = row;
    }
    return kvant_attention_run(&plan, workspace, plan.total * sizeof(float));
}

/* Whether attention reads the row as fp16, and so may run before the write ends. Arguments that a
 * write refuses are left to it. */
static bool is_step(const kvant_tensor *k, const kvant_tensor *v)
{
    return k && v && k != v && !(k->steps && k->steps == v->steps) && k->step_rows &&
           v->step_rows && !k->device && !v->device;
}

static kvant_status write_and_attend(kvant_tensor *k, kvant_tensor *v,
                                     const kvant_attention_problem *problem,
                                     kvant_attention_step *step)
{
    const kvant_rows rows[] = { { k, step->k_row, step->k_row, 0 },
                                { v, step->v_row, step->v_row, 0 } };
    row_write row = { .problem = problem, .step = step, .noted = KVANT_OK, .closed = false };
    kvant_write *write = &row.write;
    kvant_status status = kvant_write_begin(write, rows, 2, &step->slot, 1, problem->n_threads);
    if (status != KVANT_OK)
        return kvant_write_end(write, status);
    kvant_write_place(&write->jobs[0]);
    kvant_write_place(&write->jobs[1]);
    status = attend(k, v, problem, step, &row);
    if (status == KVANT_OK)
        kvant_write_encoded(write->jobs, 2);
    else
        kvant_write_encode(write->jobs, 2);
    if (!row.closed) /* attention did not begin */
        close_write(&row);
    kvant_write_release(write);
    return status == KVANT_OK ? row.noted : status;
}

kvant_status kvant_attention_step_run(kvant_tensor *k, kvant_tensor *v,
                                      const kvant_attention_problem *problem,
                                      kvant_attention_step *step)
{
    kvant_attention_problem p;
    KVANT_RETURN_IF(!step || !KVANT_ACCEPT_STRUCT(kvant_attention_problem, &p, problem, exact),
                    KVANT_ERR_ARGUMENT);
    step->stored = false;
    if (step->k_row && is_step(k, v)) {
        KVANT_FORWARD(write_and_attend(k, v, &p, step));
        return note_queries(k, &p, step);
    }
    if (step->k_row)
        KVANT_FORWARD(kvant_tensor_write_layer(k, v, &step->slot, 1, step->k_row, 0, step->v_row, 0,
                                               p.n_threads));
    step->stored = step->k_row != NULL;
    KVANT_FORWARD(attend(k, v, &p, step, NULL));
    return note_queries(k, &p, step);
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
