/* cells.h - inside of kvant_cells, for attention and for the files of this folder: cells.c (life, layout),
 * write.c (writing and reading), open.c (fp16 pages), affine.c (centre and factors). */
#ifndef KVANT_CACHE_CELLS_H
#define KVANT_CACHE_CELLS_H

#include <kvant/cache.h>

#include "../codec/encode.h"

typedef struct kvant_page_group {
    uint64_t written;  /* bit per cell */
    int32_t open_slot; /* -1: sealed */
    bool touched;      /* its sealed pages were written to; until then their memory is not */
} kvant_page_group;

/* Slots 0 .. n_sink_slots - 1 belong to the sink pages of the streams, in order; the others are the pool. */
typedef struct kvant_open_slot {
    int64_t group;  /* -1: free */
    uint64_t fresh; /* bit per cell: written since the group was opened, so its sealed bytes are not up to date */
    uint64_t stamp; /* the stream's clock when it was last written */
    uint64_t used;  /* the same by the clock of all streams */
} kvant_open_slot;

/* What is known of the first rows while centre or factors wait for them; arrays of n_kv_heads x head_dim. */
typedef struct kvant_first_rows {
    bool waiting;
    uint32_t n;
    double *sum;
    float *min, *max;
} kvant_first_rows;

struct kvant_cells {
    kvant_cells_config config;  /* codec and codecs point to codecs[0] and codecs */
    const kvant_codec **codecs; /* of each kv head */
    kvant_codec *
        *open_codecs;     /* of each kv head, one object where codecs are one; NULL when nothing is ever open */
    size_t *page_offsets; /* of each kv head's sealed page in its group: codecs of kv heads may differ in size */
    size_t group_bytes, open_page_bytes;
    uint32_t n_pages;                    /* of one stream */
    uint32_t n_sink_pages, n_sink_slots; /* of one stream; of all */
    uint32_t n_slots;
    uint32_t window_groups;   /* groups of the pool that a stream's window needs */
    bool always_open;         /* cells pass through open pages, not only sinks and the first rows */
    uint8_t *sealed, *open;   /* the caller's memory */
    kvant_page_group *groups; /* n_streams x n_pages */
    kvant_open_slot *slots;
    uint64_t *clocks, used; /* rows written: by stream, in all */
    float *center, *scale;  /* n_kv_heads x head_dim each */
    bool has_center, has_scale, any_written;
    kvant_first_rows first;
    float *scratch; /* KVANT_SEAL_WORKERS x block_tokens x head_dim */
};

#define KVANT_SEAL_WORKERS 8u

static inline size_t kvant_cells_width(const kvant_cells *cells)
{
    return (size_t)cells->config.n_kv_heads * cells->config.codec->info.head_dim;
}

/* Centre and factors of one kv head. */
static inline kvant_affine kvant_cells_head_affine(const kvant_cells *cells, uint32_t head)
{
    size_t first = (size_t)head * cells->config.codec->info.head_dim;
    return (kvant_affine){ cells->has_center ? cells->center + first : NULL,
                           cells->has_scale ? cells->scale + first : NULL };
}

static inline void *kvant_sealed_page(const kvant_cells *cells, size_t group, uint32_t kv_head)
{
    return cells->sealed + group * cells->group_bytes + cells->page_offsets[kv_head];
}

static inline bool kvant_is_sink(const kvant_cells *cells, size_t group)
{
    return group % cells->n_pages < cells->n_sink_pages;
}

#endif
