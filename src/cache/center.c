/* center.c - see center.h. */
#include "center.h"
#include "learning.h"

#include <math.h>

#include <kvant/tensor_hooks.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/attributes.h"

size_t kvant_centers_bytes(const kvant_tensor *tensor)
{
    return sizeof(kvant_centers) + 2 * kvant_tensor_width(tensor) * sizeof(float) +
           tensor->head_dim / 2 * sizeof(kvant_pair) + tensor->head_dim * sizeof(double);
}

static kvant_centers *allocate(const kvant_tensor *tensor)
{
    kvant_centers *centers = kvant_alloc(1, kvant_centers_bytes(tensor));
    if (!centers)
        return NULL;
    centers->step = (double *)(centers + 1);
    centers->start = (float *)(centers->step + tensor->head_dim);
    centers->placed = centers->start + kvant_tensor_width(tensor);
    centers->pairs = (kvant_pair *)(centers->placed + kvant_tensor_width(tensor));
    centers->n = tensor->head_dim / 2;
    centers->last = KVANT_NO_POSITION;
    return centers;
}

kvant_status kvant_centers_create(const kvant_tensor *tensor, const kvant_rope *rope,
                                  kvant_centers **out)
{
    kvant_centers *centers = *out = allocate(tensor);
    KVANT_RETURN_IF(!centers, KVANT_ERR_MEMORY);
    centers->n_dims = rope->n_dims;
    centers->interleaved = rope->interleaved;
    if (tensor->head_dim % 2 || !kvant_rope_pairs(rope, tensor->head_dim, centers->pairs)) {
        kvant_free(centers);
        *out = NULL;
        return KVANT_ERR_FORMAT;
    }
    for (uint32_t i = 0; i < centers->n; i++)
        kvant_rope_sin_cos((double)KVANT_PAGE_TOKENS * centers->pairs[i].frequency,
                           &centers->step[centers->n + i], &centers->step[i]);
    return KVANT_OK;
}

kvant_centers *kvant_centers_copy(const kvant_tensor *tensor, const kvant_centers *centers)
{
    kvant_centers *copy = centers ? allocate(tensor) : NULL;
    if (!copy)
        return NULL;
    copy->n_dims = centers->n_dims;
    copy->interleaved = centers->interleaved;
    memcpy(copy->start, centers->start, kvant_tensor_width(tensor) * sizeof(float));
    memcpy(copy->pairs, centers->pairs, centers->n * sizeof *centers->pairs);
    memcpy(copy->step, centers->step, tensor->head_dim * sizeof *centers->step);
    return copy;
}

bool kvant_centers_same_rope(const kvant_centers *a, const kvant_centers *b)
{
    return memcmp(a->pairs, b->pairs, a->n * sizeof *a->pairs) == 0;
}

bool kvant_centers_equal(const kvant_tensor *tensor, const kvant_centers *a, const kvant_centers *b)
{
    if (!a || !b)
        return !a && !b;
    return kvant_centers_same_rope(a, b) &&
           memcmp(a->start, b->start, kvant_tensor_width(tensor) * sizeof *a->start) == 0;
}

static void find_phase(const kvant_pair *pairs, uint32_t n, int32_t position, float *phase)
{
    for (uint32_t i = 0; i < n; i++) {
        double sine, cosine;
        kvant_rope_sin_cos((double)position * pairs[i].frequency, &sine, &cosine);
        phase[i] = (float)cosine;
        phase[n + i] = (float)sine;
    }
}

kvant_status kvant_rope_phase(const kvant_rope *rope, uint32_t head_dim, int32_t position,
                              float *phase, uint16_t *pairs)
{
    kvant_rope r;
    kvant_pair all[KVANT_MAX_HEAD_DIM / 2];
    KVANT_RETURN_IF(!phase || !head_dim || head_dim % 2 || head_dim > KVANT_MAX_HEAD_DIM,
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!KVANT_ACCEPT_STRUCT(kvant_rope, &r, rope, n_position_transforms),
                    KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(kvant_rope_check(&r, head_dim));
    KVANT_RETURN_IF(!kvant_rope_pairs(&r, head_dim, all), KVANT_ERR_ARGUMENT);
    find_phase(all, head_dim / 2, position, phase);
    for (uint32_t i = 0; pairs && i < head_dim / 2; i++) {
        pairs[2 * i] = all[i].first;
        pairs[2 * i + 1] = all[i].second;
    }
    return KVANT_OK;
}

static void rotate_center(const kvant_centers *centers, const float *phase, const float *start,
                          float *center)
{
    for (uint32_t i = 0; i < centers->n; i++) {
        const kvant_pair *pair = &centers->pairs[i];
        const float a = start[pair->first], b = start[pair->second], cosine = phase[i],
                    sine = phase[centers->n + i];
        center[pair->first] = a * cosine - b * sine;
        center[pair->second] = b * cosine + a * sine;
    }
}

kvant_affine kvant_affine_at(const kvant_tensor *tensor, uint32_t transform_id, uint32_t head,
                             int32_t position, float *room)
{
    kvant_affine affine = kvant_tensor_transform_affine(tensor, transform_id, head);
    const kvant_centers *centers = kvant_tensor_transform_centers(tensor, transform_id);
    const size_t at = (size_t)head * tensor->head_dim;
    float phase[KVANT_MAX_HEAD_DIM];
    if (!centers || !affine.center || position == KVANT_NO_POSITION)
        return affine;
    affine.center = centers->last == position ? centers->placed + at : room;
    if (affine.center == room) {
        find_phase(centers->pairs, centers->n, position, phase);
        rotate_center(centers, phase, centers->start + at, room);
    }
    return affine;
}

kvant_affine kvant_affine_widest(const kvant_tensor *tensor, uint32_t transform_id, uint32_t head,
                                 float *room)
{
    kvant_affine affine = kvant_tensor_transform_affine(tensor, transform_id, head);
    const kvant_centers *centers = kvant_tensor_transform_centers(tensor, transform_id);
    if (!centers || !affine.center)
        return affine;
    const float *start = centers->start + (size_t)head * tensor->head_dim;
    memcpy(room, affine.center, tensor->head_dim * sizeof *room);
    for (uint32_t i = 0; i < centers->n; i++) {
        const float a = start[centers->pairs[i].first], b = start[centers->pairs[i].second],
                    most = fabsf(a) + fabsf(b);
        room[centers->pairs[i].first] = fmaxf(fabsf(room[centers->pairs[i].first]), most);
        room[centers->pairs[i].second] = fmaxf(fabsf(room[centers->pairs[i].second]), most);
    }
    affine.center = room;
    return affine;
}

void kvant_centers_recall(kvant_tensor *tensor, uint32_t block)
{
    const int32_t position = tensor->blocks[block].position;
    kvant_centers *centers = kvant_block_centers(tensor, block);
    float phase[KVANT_MAX_HEAD_DIM];
    if (!centers || centers->last == position)
        return;
    find_phase(centers->pairs, centers->n, position, phase);
    for (size_t at = 0; at < kvant_tensor_width(tensor); at += tensor->head_dim)
        rotate_center(centers, phase, centers->start + at, centers->placed + at);
    centers->last = position;
}

int32_t kvant_position_of_rows(const kvant_tensor *tensor, const int64_t *slots, size_t n_slots,
                               size_t first, size_t n)
{
    const kvant_learning *l = tensor->learning;
    const kvant_new_rows rows = { .n = n_slots, .slots = slots };
    int32_t begin = KVANT_NO_POSITION;
    for (size_t i = first; i < first + n; i++) {
        const int32_t at =
            l && l->rope && l->rope->block_centers ? kvant_row_position(tensor, &rows, i) : -1;
        const int64_t own = (int64_t)at - slots[i] % KVANT_PAGE_TOKENS;
        if (at < 0 || !kvant_is_block_position(own) || (i > first && own != begin))
            return KVANT_NO_POSITION;
        begin = (int32_t)own;
    }
    return begin;
}

void kvant_center_products(const kvant_tensor *tensor, uint32_t transform_id, uint32_t head,
                           const float *q, float factor, float *products)
{
    const kvant_centers *centers = kvant_tensor_transform_centers(tensor, transform_id);
    const float *start = centers->start + (size_t)head * tensor->head_dim;
    for (uint32_t i = 0; i < centers->n; i++) {
        const kvant_pair *pair = &centers->pairs[i];
        const float a = start[pair->first], b = start[pair->second];
        products[i] = (q[pair->first] * a + q[pair->second] * b) * factor;
        products[centers->n + i] = (q[pair->second] * a - q[pair->first] * b) * factor;
    }
}
