/* open.c - see open.h. Open pages hold transformed rows, so opening and sealing never apply the rotation again. */
#include "open.h"

#include <string.h>

void *kvant_open_page(const kvant_cells *cells, int32_t slot, uint32_t kv_head)
{
    return cells->open + ((size_t)slot * cells->config.n_kv_heads + kv_head) * cells->open_page_bytes;
}

static void *sealed_page(const kvant_cells *cells, size_t group, uint32_t kv_head)
{
    return cells->sealed + (group * cells->config.n_kv_heads + kv_head) * cells->page_bytes;
}

/* A free slot, or else the one that was not written for longest, sealed to make room. */
static kvant_status take_slot(kvant_cells *cells, int32_t *slot)
{
    uint32_t oldest = 0;
    for (uint32_t i = 0; i < cells->config.n_open_groups; i++) {
        if (cells->slots[i].group < 0) {
            *slot = (int32_t)i;
            return KVANT_OK;
        }
        if (cells->slots[i].stamp < cells->slots[oldest].stamp)
            oldest = i;
    }
    KVANT_FORWARD(kvant_seal_group(cells, (size_t)cells->slots[oldest].group));
    *slot = (int32_t)oldest;
    return KVANT_OK;
}

static void assign(kvant_cells *cells, int32_t slot, size_t group)
{
    cells->slots[slot] = (kvant_open_slot){ (int64_t)group, ++cells->clock };
    cells->groups[group].open_slot = slot;
    memset(kvant_open_page(cells, slot, 0), 0, cells->open_page_bytes * cells->config.n_kv_heads);
}

kvant_status kvant_open_group(kvant_cells *cells, size_t group)
{
    int32_t slot;
    KVANT_FORWARD(take_slot(cells, &slot));
    assign(cells, slot, group);
    uint64_t written = cells->groups[group].written;
    for (uint32_t head = 0; head < cells->config.n_kv_heads; head++)
        for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
            float y[KVANT_MAX_HEAD_DIM];
            if (!(written >> t & 1))
                continue;
            kvant_codec_decode_transformed(cells->config.codec, sealed_page(cells, group, head), t, y);
            kvant_rows rows = { NULL, y, cells->config.codec->info.head_dim, true };
            cells->open_codec->quantizer->encode(cells->open_codec, &rows, 0, t,
                                                 kvant_open_page(cells, slot, head));
        }
    return KVANT_OK;
}

static void gather_rows(const kvant_cells *cells, const void *page, uint64_t written)
{
    uint32_t head_dim = cells->config.codec->info.head_dim, stand_in = 0;
    while (!(written >> stand_in & 1))
        stand_in++;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        kvant_codec_decode_transformed(cells->open_codec, page, written >> t & 1 ? t : stand_in,
                                       cells->scratch + (size_t)t * head_dim);
}

kvant_status kvant_seal_group(kvant_cells *cells, size_t group)
{
    kvant_page_group *state = &cells->groups[group];
    int32_t slot = state->open_slot;
    for (uint32_t head = 0; state->written && head < cells->config.n_kv_heads; head++) {
        gather_rows(cells, kvant_open_page(cells, slot, head), state->written);
        KVANT_FORWARD(kvant_codec_seal(cells->config.codec, cells->scratch, sealed_page(cells, group, head)));
    }
    cells->slots[slot].group = -1;
    state->open_slot = -1;
    return KVANT_OK;
}

kvant_status kvant_open_copy(const kvant_cells *from, int32_t slot, kvant_cells *to, size_t target)
{
    int32_t taken;
    KVANT_FORWARD(take_slot(to, &taken));
    assign(to, taken, target);
    memcpy(kvant_open_page(to, taken, 0), kvant_open_page(from, slot, 0),
           from->open_page_bytes * from->config.n_kv_heads);
    return KVANT_OK;
}
