/* outlier_pool.h - HQMQ's outliers as its paper has them (section 3, equation 2): chunks of 4
 * channels far above the median of many tokens, any number per token. The tokens are the 64 tokens
 * of a page, which has room for `slots` such chunks. format.md, "Outliers of a page", has the
 * rule. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "../codec_internal.h"

typedef struct kvant_outlier_pool {
    uint32_t head_dim, n_chunks; /* of a token */
    uint32_t slots;
    float multiple; /* an outlier exceeds the median norm this many times */
} kvant_outlier_pool;

/* Says which chunks are outliers. The caller asks for every chunk, in the page's order. */
typedef struct kvant_outlier_choice {
    uint32_t above; /* bits of a squared norm: all chunks with larger norms are outliers */
    /* so are this many chunks with an equal norm, the first ones in the page's order */
    uint32_t ties;
} kvant_outlier_choice;

/* The check of families with outliers of a page (kvant_quantizer): whether the row fits fp16.
 * Stored scales do not depend on the row alone and are cut. */
kvant_status kvant_outlier_pool_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                      const float *y);

/* y: the 64 rows of the page. */
kvant_outlier_choice kvant_outlier_pool_choose(const kvant_outlier_pool *pool, const float *y);

/* Whether the next chunk, which belongs to this row, is an outlier. */
bool kvant_outlier_is_next(const kvant_outlier_pool *pool, kvant_outlier_choice *choice,
                           const float *row, uint32_t chunk);

/* Stores a chunk in a slot, or reads it. slots: the page's slots, 4 halves each. Channels beyond
 * head_dim are 0. */
void kvant_outlier_put(const kvant_outlier_pool *pool, const float *row, uint32_t chunk,
                       uint16_t *slots, uint32_t slot);
void kvant_outlier_get(const uint16_t *slots, uint32_t slot, float chunk[4]);

/* range=inner|all: whether outliers count for the radius scale of ordinary chunks. inner follows
 * the paper's text, all follows its authors' program. */
extern const char *const kvant_outlier_range_names[];

/* Reads med3, med=C and slots=N of families with outliers of a page, and fills multiple and slots.
 * most: the codes that can name a slot. name: the family, for messages. */
kvant_status kvant_outlier_pool_resolve(kvant_outlier_pool *pool, int32_t med, int32_t slots,
                                        uint32_t most, const char *name, const kvant_error *error);
