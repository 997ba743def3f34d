/* outlier_pool.h - HQMQ's outliers as its paper has them (section 3, equation 2): chunks of 4
 * channels far above the median of many tokens, any number per token. The tokens are those of a
 * page, which has room for `slots` such chunks. format.md, "Outliers of a page", has the rule. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "../codec_internal.h"

typedef struct kvant_outlier_pool {
    uint32_t head_dim, n_chunks; /* of a token */
    uint32_t slots;
    float multiple; /* of the median norm that an outlier exceeds */
} kvant_outlier_pool;

/* Which chunks are outliers, asked chunk by chunk in the page's order. */
typedef struct kvant_outlier_choice {
    uint32_t above; /* bits of a squared norm: all larger ones are outliers, */
    uint32_t ties;  /* and so many equal ones */
} kvant_outlier_choice;

/* y: 64 rows. */
kvant_outlier_choice kvant_outlier_pool_choose(const kvant_outlier_pool *pool, const float *y);

/* For the next chunk, of this row. */
bool kvant_outlier_is_next(const kvant_outlier_pool *pool, kvant_outlier_choice *choice,
                           const float *row, uint32_t chunk);

/* Stores a chunk in a slot, or reads it; slots: those of the page, 4 halves each. Channels beyond
 * head_dim are 0. */
void kvant_outlier_put(const kvant_outlier_pool *pool, const float *row, uint32_t chunk,
                       uint16_t *slots, uint32_t slot);
void kvant_outlier_get(const uint16_t *slots, uint32_t slot, float chunk[4]);

/* range=inner|all: whether outliers count for the scale of the others; the paper's text, its
 * authors' program. */
extern const char *const kvant_outlier_range_names[];

/* med3, med=C and slots=N of families with a page's outliers: fills multiple and slots. most: codes
 * that can name a slot. name: of the family, for words. */
kvant_status kvant_outlier_pool_resolve(kvant_outlier_pool *pool, int32_t med, int32_t slots,
                                        uint32_t most, const char *name, const kvant_error *error);
