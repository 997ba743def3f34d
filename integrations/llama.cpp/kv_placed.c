/* kv_placed.c - rows of a cache with one stream: they go to the slots of the cache's placement
 * (placement.h).
 *
 * Only the mask tells which sequence a row belongs to. llama.cpp computes the mask after it stores
 * the rows of the first layer. So rows of a batch that is not placed yet wait in a copy. They are
 * stored when the attention node that reads them brings the mask, or when any other call needs
 * them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kv_tensor.h"
#include "log.h"

#define NO_SINK (UINT32_MAX / 2) /* index of a block that is no sequence's first, whatever a codec's sink is */

/* Tells the tensor of a block that begins anew. Windows are for the first KVP_WINDOW_SEQUENCES
 * sequences. */
static kvant_status assign_block(kvp_kv *kv, uint32_t block)
{
    kvp_block place = kvp_placement_block(kv->placement, block);
    bool windows = place.sequence < KVP_WINDOW_SEQUENCES;
    kvant_status status = KVANT_OK;

    if (kv->generations[block] == place.generation)
        return KVANT_OK;
    if (kv->generations[block] != 0)
        status = kvant_tensor_clear_blocks(kv->tensor, block, 1);
    if (status == KVANT_OK)
        status = kvant_tensor_assign(kv->tensor, block, windows ? place.sequence : 0, windows ? place.index : NO_SINK);
    if (status == KVANT_OK)
        kv->generations[block] = place.generation;
    return status;
}

kvant_status kvp_kv_store(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows, size_t stride,
                          const kvp_mask *mask, uint32_t n_threads)
{
    int64_t *slots = malloc((n + 1) * sizeof(*slots));
    kvant_status status = slots != NULL ? KVANT_OK : KVANT_ERR_MEMORY;

    if (slots != NULL && kv->placement == NULL)
        for (size_t i = 0; i < n; i++)
            slots[i] = kvp_kv_slot(kv, cells[i]);
    else if (slots != NULL && !kvp_placement_write(kv->placement, cells, n, mask, slots))
        status = KVANT_ERR_MEMORY;
    for (size_t i = 0; i < n && status == KVANT_OK && kv->placement != NULL; i++)
        status = assign_block(kv, (uint32_t)(slots[i] / KVP_BLOCK));
    if (status == KVANT_OK)
        status = kvant_tensor_write(kv->tensor, slots, n, rows, stride, n_threads);
    free(slots);
    return status;
}

static bool is_finite(const float *rows, size_t stride, size_t n, size_t width)
{
    float sum = 0; /* a NaN or an infinity stays one, times 0 it is a NaN */

    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < width; j++)
            sum += rows[i * stride + j] * 0;
    return sum == 0;
}

static kvant_status keep(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows, size_t stride)
{
    const size_t width = kv->shape.row;
    struct kvp_waiting waiting = { malloc(n * sizeof(*cells)), malloc(n * width * sizeof(*rows)), n };

    if (waiting.cells == NULL || waiting.rows == NULL) {
        free(waiting.cells);
        free(waiting.rows);
        return KVANT_ERR_MEMORY;
    }
    memcpy(waiting.cells, cells, n * sizeof(*cells));
    for (size_t i = 0; i < n; i++)
        memcpy(waiting.rows + i * width, rows + i * stride, width * sizeof(*rows));
    kv->waiting = waiting;
    return KVANT_OK;
}

kvant_status kvp_kv_enter(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows, size_t stride,
                          uint32_t n_threads)
{
    kvant_status status = kvp_kv_flush(kv, NULL, n_threads);

    if (status != KVANT_OK)
        return status;
    if (kv->placement == NULL || kvp_placement_is_last(kv->placement, cells, n))
        return kvp_kv_store(kv, cells, n, rows, stride, NULL, n_threads);
    return is_finite(rows, stride, n, kv->shape.row) ? keep(kv, cells, n, rows, stride) : KVANT_ERR_NONFINITE;
}

void kvp_kv_forget_waiting(kvp_kv *kv)
{
    free(kv->waiting.cells);
    free(kv->waiting.rows);
    kv->waiting = (struct kvp_waiting){ 0 };
}

kvant_status kvp_kv_flush(kvp_kv *kv, const kvp_mask *mask, uint32_t n_threads)
{
    kvant_status status;

    if (kv->waiting.n == 0)
        return KVANT_OK;
    if (mask != NULL && (mask->rows == NULL || mask->n_tokens < kv->waiting.n))
        mask = NULL;
    status = kvp_kv_store(kv, kv->waiting.cells, kv->waiting.n, kv->waiting.rows, kv->shape.row, mask, n_threads);
    kvp_kv_forget_waiting(kv);
    return status;
}
